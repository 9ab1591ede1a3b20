# One image for a Ray head, a Ray worker and the driver of a job.
#
#   docker build -t ssl-sec:0.1.0 .                              # PyTorch's ordinary CUDA build; it runs on CPUs too
#   docker build -t ssl-sec:0.1.0-cpu --build-arg VARIANT=cpu .  # about 5 GB smaller, without CUDA
#
# Not yet built: there was no Docker engine where this was written. hadolint and tests/cluster hold its rules.
#
# A tag can be moved to another image; a digest cannot. To pin by digest, ask the registry once:
#   docker buildx imagetools inspect python:3.11.15-slim-trixie
# and append what it calls Digest: --build-arg PYTHON_IMAGE=python:3.11.15-slim-trixie@sha256:<digest>
ARG PYTHON_IMAGE=python:3.11.15-slim-trixie
ARG VARIANT=cuda

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS system
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# g++ is for runtime.compile=true (TorchInductor and Triton compile on the spot), wget for the probes of KubeRay
# operators before 1.5. Debian keeps only the newest build of a package, so a pin would soon fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/*
# Into the image's own Python and no virtual environment: login shells, such as KubeRay can use, reset PATH and would
# lose one.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY constraints.txt ./

# The largest layer comes first and changes with constraints.txt alone. torch and torchvision must come from one index:
# a CPU-only torch beside the ordinary torchvision fails at import (torchvision::nms does not exist).
FROM system AS torch-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --constraint constraints.txt torch torchvision

FROM system AS torch-cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu \
        torch torchvision

# hadolint ignore=DL3006
FROM torch-${VARIANT} AS final
WORKDIR /build
# The dependencies are a layer of their own, so that a change of the code does not install them anew.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c "import tomllib; \
        print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && python -m pip install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY configs configs
COPY ssl_sec ssl_sec
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --no-deps . \
    && python -P -c "import torchvision, ssl_sec.edges.composition.compose" \
    && useradd --uid 1000 --create-home --shell /bin/bash ssl_sec

# NVIDIA's container toolkit reads the capabilities. NVIDIA_VISIBLE_DEVICES is left unset on purpose: it would show all
# GPUs of a machine to a Ray head that asked for none.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    GIT_PYTHON_REFRESH=quiet \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0
# By number, so that Kubernetes can see that it is not root.
USER 1000:1000
WORKDIR /home/ssl_sec

# No HEALTHCHECK: a head, a worker and a driver are healthy in different ways, and Kubernetes ignores it; the manifests
# in jobs/cluster have probes. No ENTRYPOINT: `ray start ...`, `ray symmetric-run ...` and `ssl-sec pretrain ...`
# all run as they stand. A job that is the container's process saves on `docker stop --timeout 120`.
CMD ["ssl-sec", "--help"]

ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ssl_sec" \
      org.opencontainers.image.description="Contrastive self-supervision with the Spherical Embedding Constraint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
