# The image that `shardwise launch --on kubernetes` runs. Built and pushed, it is named by its digest:
#
#   docker build --build-arg BASE=IMAGE@sha256:... --tag REPOSITORY/shardwise . && docker push REPOSITORY/shardwise
#   docker inspect --format '{{index .RepoDigests 0}}' REPOSITORY/shardwise
#
# BASE is an image with Python and a torch that the package takes (see pyproject.toml), its CUDA and NCCL: torch's own, or
# that of your site. By its digest, the same file makes the same image.
ARG BASE
FROM ${BASE}

# A compiler is what Triton and torch.compile call when a kernel is first used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/shardwise
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# torch is there already, in a release that the package takes.
RUN python -m pip install --no-cache-dir '.[serve]'

# Pods run as this user; nothing in the image is theirs to change.
RUN useradd --uid 1000 --create-home --shell /usr/sbin/nologin shardwise
USER 1000:1000
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1
ENTRYPOINT []
CMD ["python", "-m", "shardwise", "--help"]
