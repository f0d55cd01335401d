# One image for every host, for CPU or CUDA, on a Debian or Ubuntu base with Python 3.11 or later.
#   make image                   CPU, as compose.yaml wants it
#   make image FLAVOUR=cuda      CUDA; torch's wheels bring its libraries, so the base needs the driver hooks only
# Needs BuildKit. No `# syntax=` line: it would fetch the frontend from a registry, which an air-gapped site lacks.

ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

# --- what build and image both stand on -------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# apt is asked only for what the base lacks: on a base that has all of it the build needs no network. Versions are the
# base's, which is pinned.
# hadolint ignore=DL3008
RUN wanted=(); \
    python3 -c 'import ensurepip' 2>/dev/null || wanted+=(python3 python3-venv); \
    command -v tini >/dev/null || wanted+=(tini); \
    [ -e /etc/ssl/certs/ca-certificates.crt ] || wanted+=(ca-certificates); \
    if [ "${#wanted[@]}" -gt 0 ]; then \
        apt-get update; \
        DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${wanted[@]}"; \
        rm -rf /var/lib/apt/lists/*; \
    fi; \
    rm -rf /var/cache/debconf/*; \
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"the base has Python {sys.version}; 3.11 is needed")'

# --- the wheels -------------------------------------------------------------------------------------------------------
FROM base AS wheels
ARG FLAVOUR=cuda
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# OFFLINE=1: docker/wheels alone, no index.
ARG OFFLINE=
# Secrets and mounts leave nothing in a layer: ca = bundle of a private CA, pip = a pip.conf (mirror, credentials).
# setuptools comes first: it builds the one package that has no wheel, without fetching an unlocked builder for it.
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,source=docker/locks,target=/locks \
    --mount=type=bind,source=docker/wheels,target=/given \
    --mount=type=secret,id=ca,target=/run/secrets/ca \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_HASHES=1 PIP_NO_DEPS=1; \
    lock=/locks/${FLAVOUR}.txt; \
    set -- --find-links /given; \
    if [ -n "${OFFLINE}" ]; then set -- "$@" --no-index; \
    elif [ "${FLAVOUR}" = cpu ] && ! ls /given/torch-* >/dev/null 2>&1; then \
        set -- "$@" --find-links "${TORCH_INDEX}/torch/"; \
    fi; \
    python3 -m venv /opt/venv; \
    awk '/^[^ ]/ { keep = /^setuptools==/ } keep' "${lock}" >/tmp/setuptools.txt; \
    /opt/venv/bin/pip install "$@" --requirement /tmp/setuptools.txt; \
    /opt/venv/bin/pip download "$@" --no-build-isolation --dest /wheels --requirement "${lock}"

# --- the Python environment: from those wheels alone ------------------------------------------------------------------
FROM wheels AS environment
# Byte code is compiled here, on all cores: a read-only image cannot keep what Python compiles later. That always fails
# for some files: torch brings a few in the syntax of newer Pythons. Packages bring their own tests, a tenth of it all;
# what is in *.dist-info are licences.
RUN --mount=type=bind,source=docker/locks,target=/locks \
    /opt/venv/bin/pip install --disable-pip-version-check --no-cache-dir --no-deps --require-hashes --no-index \
        --no-compile --find-links /wheels --no-build-isolation --use-pep517 \
        --requirement "/locks/${FLAVOUR}.txt"; \
    /opt/venv/bin/pip uninstall --quiet --yes pip; \
    find /opt/venv/lib -name '*.dist-info' -prune -o -type d \( -name tests -o -path '*-packages/torch/test' \) \
        -prune -exec rm -r {} +; \
    /opt/venv/bin/python -m compileall -q -j 0 /opt/venv/lib || true

# --- Muster itself ----------------------------------------------------------------------------------------------------
FROM base AS program
COPY train /opt/muster/train
COPY docker/entrypoint docker/launch docker/healthcheck /usr/local/bin/
# COPY keeps modes: those of a clone that was made under umask 077 would let nobody but root in.
RUN chmod -R u=rwX,go=rX /opt/muster /usr/local/bin; \
    python3 -m compileall -q /opt/muster

# --- the image --------------------------------------------------------------------------------------------------------
FROM base AS image
COPY --from=environment /opt/venv /opt/venv
COPY --from=program /opt/muster /opt/muster
COPY --from=program /usr/local/bin/ /usr/local/bin/
ARG TORCH_VERSION=2.13.0
# Unbuffered, so that logs are whole when a rank is killed. PYTORCH_VERSION is what enroot's PyTorch hook looks for.
# HOME is a tmpfs where the root file system is read-only; LOGNAME serves ids that no passwd file knows.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/muster \
    PYTHONUNBUFFERED=1 \
    PYTORCH_VERSION=${TORCH_VERSION} \
    MUSTER_RUNS_DIR=/runs \
    MUSTER_HEARTBEAT_FILE=/tmp/heartbeat \
    HOME=/tmp \
    LOGNAME=muster
# An id by number: Kubernetes' runAsNonRoot cannot check a name. The SBOM is read from what is really installed.
RUN --mount=type=bind,source=docker/sbom.py,target=/sbom.py \
    install -d -o 10001 -g 10001 /runs; \
    python3 /sbom.py >/usr/local/share/sbom.cdx.json
USER 10001:10001
WORKDIR /opt/muster
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=90s --retries=3 CMD ["healthcheck"]
ENTRYPOINT ["entrypoint"]
CMD ["python", "-m", "train", "--help"]
ARG REVISION=unknown
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="Muster" \
      org.opencontainers.image.description="A PyTorch training job, from one process to many machines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
