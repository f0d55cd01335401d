"""What to do about what is wrong, in the commands and options of whichever launcher says it."""

from __future__ import annotations

from dataclasses import dataclass

_OF_HOSTS = ": run provision.yml"
"""How what a host tells by the modules of ansible/roles/job ends, where setting it up mends it."""


@dataclass(frozen=True)
class Remedies:
    """One launcher's; these are Ansible's."""

    set_up: str = "run provision.yml"
    """A host that lacks something."""
    make_environment: str = "run provision.yml"
    bring_image: str = "run provision.yml"
    """With `{image}` for its name."""
    device: str = "muster_device"
    """What says where to train."""
    on_cpu: str = "-e muster_device=cpu"
    leave_out: str = "leave hosts out by --limit"
    stop: str = "stop.yml"
    share: str = "-e share=true"
    run_id: str = "run_id"
    """What names the run."""
    runs_dir: str = "muster_runs_dir in the inventory"
    """What says where runs are kept on hosts."""

    def of(self, problem: str) -> str:
        """What a host told of itself, with this launcher's remedy behind it."""
        what, needs_one, _ = problem.rpartition(_OF_HOSTS)
        if not needs_one:
            return problem
        if what.startswith("no Python environment"):
            return f"{what}: {self.make_environment}"
        if what.startswith("no image "):
            return f"{what}: {self.bring_image.format(image=what.removeprefix('no image '))}"
        return f"{what}: {self.set_up}"


ANSIBLE = Remedies()
