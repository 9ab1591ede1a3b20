# One image for a Ray head, Ray workers and the driver of a job.
#
#   docker build -t ssl-sec:0.2.0.dev0 .                              # PyTorch's default CUDA build; it runs on CPUs too
#   docker build -t ssl-sec:0.2.0.dev0-cpu --build-arg VARIANT=cpu .  # about 5 GB smaller, without CUDA
#
# Built and run with VARIANT=cuda (7.5 GB) by Docker 20.10 (BuildKit), on a base image made from Debian 12 with its Python
# 3.11, and by Podman 4.3 (Buildah 1.28) on one from Debian 13; not yet with the official Python image, VARIANT=cpu or a GPU.
# This Podman finds the stage only if VARIANT is given, as `make image` does. hadolint and tests/cluster check this file.
#
# A tag can be moved to another image; a digest cannot. To pin by digest, look it up:
#   docker buildx imagetools inspect python:3.11.15-slim-trixie
# and pass it: --build-arg PYTHON_IMAGE=python:3.11.15-slim-trixie@sha256:<digest>
ARG PYTHON_IMAGE=python:3.11.15-slim-trixie
ARG VARIANT=cuda

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS system
# g++ is needed for runtime.compile=true (TorchInductor and Triton compile at run time), wget for the probes of KubeRay
# operators before 1.5. Debian keeps only the newest build of a package, so a pinned version would soon fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/*
# Packages go into the image's own Python: KubeRay can use login shells, which reset PATH and would not find a virtual
# environment.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY constraints.txt ./

# The largest layer comes first and changes only with constraints.txt. torch and torchvision must come from the same index:
# a CPU-only torch with the default torchvision fails at import (torchvision::nms does not exist).
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
# The dependencies have their own layer, so that a change of the code does not reinstall them.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c "import tomllib; \
        project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        optional = sum((project['optional-dependencies'][name] for name in ('s3', 'gcs', 'azure', 'tiff', 'heif')), []); \
        print(*project['dependencies'], *optional, sep='\n')" \
        > requirements.txt \
    && python -m pip install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE ./
COPY configs configs
COPY ssl_sec ssl_sec
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install --no-deps . \
    && python -P -c "import torchvision, ssl_sec.edges.composition.compose" \
    && useradd --uid 1000 --create-home --shell /bin/bash ssl_sec \
    && chmod 1777 /home/ssl_sec

# NVIDIA's container toolkit reads the capabilities. NVIDIA_VISIBLE_DEVICES is unset on purpose: it would expose all GPUs
# of a machine to a Ray head that requested none. With HOME, and a home that all may write to, the image also runs as
# another user (--user "$(id -u):$(id -g)"), who then owns what is written to a mounted folder.
ENV HOME=/home/ssl_sec \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    GIT_PYTHON_REFRESH=quiet \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0
# By number, so that Kubernetes can verify that it is not root.
USER 1000:1000
WORKDIR /home/ssl_sec

# No HEALTHCHECK: a head, a worker and a driver need different checks, and Kubernetes ignores it; the manifests in
# jobs/cluster have probes. No ENTRYPOINT, so that `ray start ...` and `ssl-sec pretrain ...` run as given. A job that is
# the container's main process saves on `docker stop -t 120`.
CMD ["ssl-sec", "--help"]

ARG VERSION=dev
ARG REVISION=unknown
# The commit of the code, for the runs in MLflow: there is no git here.
ENV SSL_SEC_COMMIT=${REVISION}
LABEL org.opencontainers.image.title="ssl_sec" \
      org.opencontainers.image.description="Contrastive self-supervision with the Spherical Embedding Constraint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
