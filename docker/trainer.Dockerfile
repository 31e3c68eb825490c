# The trainer: nmoe-core with its `train` extra, from the workspace's lock. Kernels are Python, compiled when a run begins.
#   docker build -f docker/trainer.Dockerfile -t nmoe-trainer .
#   docker run --rm --gpus all --ipc=host -v $PWD/runs:/home/nmoe/runs -v $PWD/data:/home/nmoe/data nmoe-trainer configs/moonlet.toml
FROM python:3.12-slim
RUN pip install --no-cache-dir uv==0.13.9 && useradd --create-home --uid 10001 nmoe
WORKDIR /opt/nmoe
COPY pyproject.toml uv.lock LICENSE NOTICE ./
COPY packages packages
RUN uv sync --locked --no-default-groups --package nmoe-core --extra train --no-editable
ENV PATH=/opt/nmoe/.venv/bin:$PATH
USER nmoe
WORKDIR /home/nmoe
COPY --chown=nmoe configs configs
RUN mkdir runs data
# Optional, a minute: the kernels of a config in the image. RUN nmoe-doctor configs/moonlet.toml --warm-up sm_90a
ENTRYPOINT ["nmoe-train"]
CMD ["--help"]
