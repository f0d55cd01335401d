"""Reports of all hosts → findings: each host by itself. Pure: nothing is looked at but what they tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from train.launch.preflight.asked import Asked
from train.launch.preflight.between import between
from train.launch.preflight.findings import ERROR, OK, WARNING, Finding
from train.launch.topology import Plan, is_loopback

Report = Mapping[str, Any]
USUAL_MEMLOCK_MB, USUAL_SHM_MB, USUAL_NOFILE = 1024, 512, 4096
HOT_C = "it is too hot, or lacks power"


def judge(plan: Plan, reports: Sequence[Report], asked: Asked, silent: Mapping[str, str]) -> list[Finding]:
    """All findings.

    Args:
        plan: the hosts that were asked for.
        reports: of those that told something.
        asked: floors.
        silent: hosts that told nothing, and why.
    """
    findings = [
        Finding("answer", ERROR, (name,), why, "see that it runs and can be logged in to, or leave it out")
        for name, why in silent.items()
    ]
    if not reports:
        return findings
    for check in _CHECKS:
        findings += _merged(check(plan, reports, asked))
    return findings + between(plan, reports, asked)


def _merged(found: Iterable[Finding]) -> list[Finding]:
    """Hosts of which the same is to be said, in one finding."""
    together: dict[tuple[str, str, str, str], list[str]] = {}
    for one in found:
        together.setdefault((one.check, one.level, one.seen, one.fix), []).extend(one.hosts)
    return [Finding(check, level, tuple(hosts), seen, fix) for (check, level, seen, fix), hosts in together.items()]


def _each(
    check: str, reports: Sequence[Report], bad: Callable[[Report], Finding | None], fine: str
) -> Iterator[Finding]:
    """Findings of hosts that are not well; else a single one that all are."""
    found = [finding for report in reports if (finding := bad(report)) is not None]
    yield from found
    if not found:
        yield Finding(check, OK, (), fine)


def _span(values: Iterable[float | int | None], unit: str = "", unlimited: str = "unlimited") -> str:
    """`8 cores`, or `8 to 16 cores`."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return unlimited
    low, high = min(numbers), max(numbers)
    return f"{low:,} {unit}".strip() if low == high else f"{low:,} to {high:,} {unit}".strip()


def _names(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    """Does each host's address mean something everywhere, and not the host itself?"""
    found = []
    for report in reports:
        for rank, host in enumerate(plan.hosts):
            told = report["facts"]["names"].get(host.address)
            if isinstance(told, str):
                found.append(
                    Finding(
                        "names", ERROR, (report["name"],), f"it cannot resolve {host.address}: {told}",
                        f"echo '<address> {host.address}' >>/etc/hosts   (there; or put it into DNS)",
                    )
                )  # fmt: skip
            elif told and len(plan.hosts) > 1 and all(is_loopback(address) for address in told):
                own = rank == report["node_rank"]
                found.append(
                    Finding(
                        "names", WARNING if own else ERROR, (report["name"],),
                        f"there {host.address} means {told[0]}, which is that host itself"
                        + (": a script that asks for its own address tells the others a useless one" if own else ""),
                        rf"sed -i '/^127\..*\b{host.address}\b/d' /etc/hosts; "
                        f"echo '<address> {host.address}' >>/etc/hosts   (there)",
                    )
                )  # fmt: skip
    yield from found or [Finding("names", OK, (), "all names resolve, none to the host itself")]


def _user(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    users: dict[str, list[str]] = {}
    for report in reports:
        users.setdefault(report["facts"]["user"].partition(":")[0], []).append(report["name"])
    if len(users) == 1:
        yield Finding("user", OK, (), f"user id {next(iter(users))} on all")
        return
    usual = max(users, key=lambda user: len(users[user]))
    for user, hosts in users.items():
        if user != usual:
            yield Finding(
                "user", ERROR, tuple(hosts), f"the job's user has the id {user} there, elsewhere {usual}",
                f"usermod --uid {usual} <user> && chown -R {usual} <run folder>   (provision.yml does it)",
            )  # fmt: skip


def _versions(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    """The same code and libraries everywhere: else the first collective hangs, or the numbers differ."""
    told = {report["name"]: {**report["facts"]["versions"], **_of_drivers(report)} for report in reports}
    found = []
    for what in dict.fromkeys(key for versions in told.values() for key in versions):
        hosts: dict[str, list[str]] = {}
        for name, versions in told.items():
            hosts.setdefault(str(versions.get(what) or "none"), []).append(name)
        usual = max(hosts, key=lambda version: len(hosts[version]))
        level = WARNING if what in ("driver", "numpy", "python") else ERROR
        found += [
            Finding("versions", level, tuple(names), f"{what} {version}, elsewhere {usual}", _version_fix(what, usual))
            for version, names in hosts.items()
            if version != usual
        ]
        if usual == "none" and what == "torch" and asked.reduces:
            found.append(Finding("versions", ERROR, tuple(hosts["none"]), "there is no torch", "pip install torch"))
    both = {f"{what} {version}" for report in told.values() for what, version in report.items() if version}
    yield from found or [Finding("versions", OK, (), ", ".join(sorted(both)))]


def _of_drivers(report: Report) -> dict[str, str]:
    rows = (report["facts"].get("gpus") or {}).get("rows") or []
    more = {"driver": str(rows[0]["driver"])} if rows else {}
    reduction = report.get("reduction") or {}
    return more | {name: str(reduction[name]) for name in ("cuda", "nccl") if name in reduction}


def _version_fix(what: str, usual: str) -> str:
    fixes = {
        "muster": "send the same code everywhere: fab push, provision.yml, or make image and send it",
        "driver": f"install driver {usual} there, and reboot",
        "python": f"python {usual} there, too: the same image, or provision.yml",
    }
    return fixes.get(what, f"pip install '{what}=={usual}'   (or the same image everywhere)")


def _gpus(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    if asked.device != "cuda":
        return
    counts = {}
    for report in reports:
        name, facts = report["name"], report["facts"]
        gpus, slots = (
            facts.get("gpus") or {"rows": [], "problem": "nothing was told"},
            plan.hosts[report["node_rank"]].slots,
        )
        counts[name] = len(gpus["rows"])
        if len(gpus["rows"]) < slots:
            seen = gpus["problem"] or f"nvidia-smi lists {len(gpus['rows'])}"
            yield Finding(
                "GPUs", ERROR, (name,),
                f"{slots} are asked for, but {seen}; of device files /dev/nvidia* there are {facts['gpu_files']}",
                "nvidia-smi; modprobe nvidia   (no GPU listed: driver or hardware; listed on the host only: container "
                "toolkit, --gpus all)",
            )  # fmt: skip
        yield from _sick(name, gpus)
    if all(counts[report["name"]] >= plan.hosts[report["node_rank"]].slots for report in reports):
        yield Finding("GPUs", OK, (), f"{_span(counts.values())} a host")


def _sick(name: str, gpus: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs that are there, but not well."""
    for row in gpus["rows"]:
        which = f"GPU {row['index']}"
        if row["ecc_errors"]:
            yield Finding(
                "GPU memory", ERROR, (name,), f"{which} has {row['ecc_errors']} uncorrected ECC errors",
                f"nvidia-smi --gpu-reset -i {row['index']}   (again? have it replaced)",
            )  # fmt: skip
        if row["hot"] or row["slowed"]:
            yield Finding(
                "GPU clocks", WARNING, (name,), f"{which} is slowed down by its hardware: {HOT_C}",
                f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {row['index']}",
            )  # fmt: skip
    if gpus.get("xids"):
        yield Finding(
            "GPU errors", WARNING, (name,), f"the driver has logged Xid {'; '.join(gpus['xids'][:3])}",
            "dmesg | grep Xid   (what each means: NVIDIA's Xid catalogue)",
        )  # fmt: skip
    if gpus.get("apart"):
        yield Finding(
            "GPU peers", WARNING, (name,), f"no direct way between {', '.join(gpus['apart'][:3])}",
            "nvidia-smi topo -m   (virtual machine or IOMMU: turn ACS off, or NCCL_P2P_DISABLE=1)",
        )  # fmt: skip


def _floors(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    """What there must be enough of."""
    cuda, memlock_fix = asked.device == "cuda", "LimitMEMLOCK=infinity for slurmd, sshd or docker; --ulimit memlock=-1"
    rows: list[tuple[str, str, str, int | None, int, str]] = [
        ("shared memory", "shm_mb", "MB", asked.min_shm_mb, USUAL_SHM_MB,
         "mount -o remount,size=50% /dev/shm   (in a container: --shm-size 1g, or --ipc host)"),
        ("locked memory", "memlock_mb", "MB", asked.min_memlock_mb, USUAL_MEMLOCK_MB if cuda else 0,
         f"ulimit -l unlimited   ({memlock_fix})"),
        ("open files", "nofile", "files", asked.min_nofile, USUAL_NOFILE if cuda else 256,
         "ulimit -n 1048576   (LimitNOFILE=1048576; --ulimit nofile=1048576)"),
    ]  # fmt: skip
    for check, key, unit, given, usual, fix in rows:
        floor, level = (usual, WARNING) if given is None else (given, ERROR)

        def low(
            report: Report, check: str = check, key: str = key, unit: str = unit, floor: int = floor,
            level: str = level, fix: str = fix,
        ) -> Finding | None:  # fmt: skip
            value = report["facts"][key]
            if value is None or value >= floor:
                return None
            return Finding(check, level, (report["name"],), f"{value:,} {unit}; {floor:,} are needed", fix)

        yield from _each(check, reports, low, _span((report["facts"][key] for report in reports), unit))


def _cores(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    def few(report: Report) -> Finding | None:
        slots, found = plan.hosts[report["node_rank"]].slots, report["facts"]["cores"]
        if found >= slots:
            return None
        return Finding(
            "cores", WARNING, (report["name"],), f"{found} may be used by {slots} ranks: they will take turns",
            "ask for more: --cpus-per-task (Slurm), --cpus (docker), or fewer ranks",
        )  # fmt: skip

    yield from _each("cores", reports, few, _span(report["facts"]["cores"] for report in reports) + " a host")


def _disk(plan: Plan, reports: Sequence[Report], asked: Asked) -> Iterator[Finding]:
    def full(report: Report) -> Finding | None:
        runs = report["facts"]["runs"]
        if runs["error"]:
            return Finding(
                "run folder", ERROR, (report["name"],), f"{asked.runs_dir} cannot be written: {runs['error']}",
                f"df -h {asked.runs_dir}; mkdir -p {asked.runs_dir}; chown {report['facts']['user']} {asked.runs_dir}",
            )  # fmt: skip
        if runs["free_mb"] is not None and runs["free_mb"] < asked.min_free_mb:
            return Finding(
                "run folder", ERROR, (report["name"],),
                f"{asked.runs_dir} has {runs['free_mb']:,} MB free; {asked.min_free_mb:,} are needed",
                f"du -xsh {asked.runs_dir}/* | sort -h   (and remove runs, or take another disk)",
            )  # fmt: skip
        return None

    free = _span((report["facts"]["runs"].get("free_mb") for report in reports), "MB free")
    yield from _each("run folder", reports, full, free + _shared(reports))


def _shared(reports: Sequence[Report]) -> str:
    """Who sees whose files."""
    seen = [report.get("seen") for report in reports]
    if len(reports) < 2 or any(ranks is None for ranks in seen):
        return ""
    everybody = sorted(report["node_rank"] for report in reports)
    if all(ranks == everybody for ranks in seen):
        return ", one folder for all hosts"
    alone = all(report["seen"] == [report["node_rank"]] for report in reports)
    return ", each host its own" if alone else ", shared by some hosts only"


_CHECKS = (_names, _user, _versions, _gpus, _floors, _cores, _disk)
