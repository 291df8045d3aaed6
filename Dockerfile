# The image that `shardwise launch --on kubernetes` runs. Built and pushed, it is named by its digest:
#
#   docker build --build-arg BASE=IMAGE@sha256:... --tag REPOSITORY/shardwise . && docker push REPOSITORY/shardwise
#   docker inspect --format '{{index .RepoDigests 0}}' REPOSITORY/shardwise
#
# BASE is an image of Debian or Ubuntu with Python and a torch that the package takes (see pyproject.toml), its CUDA and
# NCCL: torch's own, or that of your site. What apt and pip add is of the day on which it is built, so it is the digest of
# what was pushed that names an image.
ARG BASE
FROM ${BASE}
USER root

# Compilers are what Triton and torch.compile call when a kernel is first used.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shardwise
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# With the torch that is there, or not at all: another release would come without the CUDA of the image. Triton's
# launchers include Python.h. Where a distribution keeps its Python to itself (PEP 668), this image is ours.
RUN python -c "import torch; print('torch==' + torch.__version__)" >/tmp/constraints.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir --constraint /tmp/constraints.txt '.[serve]' \
    && test -e "$(python -c "import sysconfig; print(sysconfig.get_path('include'))")/Python.h" \
    && rm /tmp/constraints.txt

# Pods run as this user, which Ubuntu's images have already; nothing in the image is theirs to change.
RUN getent passwd 1000 || useradd --uid 1000 --create-home --shell /usr/sbin/nologin shardwise
USER 1000:1000
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1
ENTRYPOINT []
CMD ["python", "-m", "shardwise", "--help"]
