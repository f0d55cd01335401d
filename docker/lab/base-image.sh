#!/usr/bin/env bash
# Makes a plain Debian image: pulled where there is a registry, else put together from Debian's packages (root only).
# usage: docker/lab/base-image.sh [IMAGE]     prints what it did; the image's name is IMAGE or muster-base:bookworm
set -euo pipefail

image=${1:-muster-base:bookworm}
suite=${SUITE:-bookworm}
docker=${DOCKER:-docker}

if timeout 60 "$docker" pull --quiet "debian:$suite-slim" >/dev/null 2>&1; then
    "$docker" tag "debian:$suite-slim" "$image"
    echo "$image: pulled debian:$suite-slim"
    exit
fi
command -v debootstrap >/dev/null || {
    echo "base-image.sh: no registry to pull debian:$suite-slim from, and no debootstrap: apt-get install debootstrap" >&2
    exit 1
}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
# What the Dockerfile would install with apt is here already, so that it builds without network.
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,tini "$suite" "$root" >"$root.log" 2>&1 || {
    tail -n 20 "$root.log" >&2
    exit 1
}
rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
    "$root"/usr/share/{doc,info,locale,man}/*
tar -C "$root" -c . | "$docker" import --change 'CMD ["bash"]' - "$image" >/dev/null
echo "$image: made by debootstrap from Debian $suite"
