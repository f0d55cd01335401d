# make demo: two processes train a language model on real text. make test: all tests. Each sets itself up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARALLEL := -n 2 --dist loadfile
# Real hosts in containers: their labs take minutes to provision.
LABS := $(wildcard tests/lab/test_provision.py tests/lab/test_ansible_launch.py tests/lab/test_ansible_sites.py tests/lab/test_slurm.py tests/lab/test_fabric.py tests/lab/test_conformance.py tests/lab/test_preflight_by_launchers.py)
FLAVOUR := cpu
SCRIPTS := docker/build docker/entrypoint docker/find-docker docker/healthcheck docker/launch docker/lock docker/up docker/lab/base-image.sh docker/lab/boot .ci/run slurm/common.sh $(wildcard slurm/*.sbatch)

ANSIBLE_YAML := $(wildcard ansible/*.yml) ansible/roles ansible/group_vars

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-lab test-fast test-container lint soak bench bench-up bench-slurm bench-preflight bench-links bench-ssh image image-lock wheels up lab lab-down lab-shell clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(READY) ## the virtual environment .venv, with the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Muster needs Python 3.11 or later; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two, torch is large"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train: two processes, DDP, a byte-level GPT on real text, two to three minutes
	$(BIN)/python -m train node --standalone --nproc-per-node 2 -- run --config ddp

test: $(READY) ## every test but those of test-lab, each fault and launcher once
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/container $(LABS:%=--ignore %)
	$(BIN)/python -m pytest tests/container

test-lab: $(READY) ## provisioning, and launches by Ansible, Slurm and SSH, on real hosts in containers: 45 minutes, needs Docker and root
	$(BIN)/python -m pytest $(PARALLEL) $(LABS)

test-container: $(READY) ## the image and two hosts in containers; needs a Docker engine
	$(BIN)/python -m pytest tests/container

test-fast: $(READY) ## unit and two-process tests, under two minutes
	$(BIN)/python -m pytest $(PARALLEL) -m 'not slow'

lint: $(READY) ## style and types; scripts, Dockerfile and YAML too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy train tests fabfile.py
	$(BIN)/mypy docker/lab/lab
	$(BIN)/hadolint Dockerfile docker/lab/Dockerfile
	$(BIN)/shellcheck $(SCRIPTS)
	$(BIN)/yamllint --strict compose.yaml compose.gpu.yaml train $(ANSIBLE_YAML)
	for file in $$(find ansible -name '*.py'); do $(BIN)/mypy --no-error-summary $$file || exit; done
	cd ansible && PATH="$(CURDIR)/$(BIN):$$PATH" ansible-lint --offline -q --profile production

soak: $(READY) ## kill a rank a hundred times, a drill of twenty faults, SSH to a hundred hosts: is anything lost or left? half an hour, needs root
	$(BIN)/python -m tests.soak
	$(BIN)/python -m train drill --config ddp --kills 20 --train.steps 200 --train.save_every 20 --train.eval_every 50
	$(BIN)/python -m tests.bench.ssh

bench: $(READY) ## measure, print figures
	$(BIN)/python -m tests.bench

bench-up: $(READY) ## seconds from `docker compose up` to the first training step, median of three
	$(BIN)/python -m tests.bench.up

bench-preflight: $(READY) ## seconds of a preflight on 2 to 100 hosts, and 20 times on hosts that are well: any false alarm? (needs root)
	$(BIN)/python -m tests.bench.preflight

bench-slurm: $(READY) ## seconds from `sbatch` to the first step beside `srun torchrun`, on the lab's Slurm; ten minutes
	$(BIN)/python -m tests.bench.slurm

bench-links: $(READY) ## bandwidth of collectives on a link held to 1 Gbit/s beside the physical limit; needs root
	$(BIN)/python -m tests.bench links

bench-ssh: $(READY) ## seconds from `fab launch` to all ranks on 10 and 100 hosts with sshd, beside OpenSSH; needs root and sshd
	$(BIN)/python -m tests.bench.ssh

image: ## the container image; FLAVOUR=cuda for GPUs
	docker/build $(FLAVOUR)

wheels: ## all wheels of the image into docker/wheels; then `OFFLINE=1 make image` needs no network
	WHEELS_ONLY=1 docker/build $(FLAVOUR)

image-lock: $(READY) ## the image's locks anew, from pyproject.toml and constraints.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" docker/lock

up: ## two hosts of two ranks in containers train together; docker/up passes the exit code on
	docker/up

lab: ## a cluster on this machine: a controller and three bare hosts; inventory in ansible/inventory/lab.yml
	docker/lab/lab up

lab-down: ## remove it
	docker/lab/lab down

lab-shell: ## log in to a host of it: make lab-shell HOST=node1
	@docker/lab/lab shell $(or $(HOST),$(error say which host: make lab-shell HOST=node1))

clean: ## remove what was made, but no runs
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
