# The dashboard: nviz alone, without torch. It reads the runs folder and needs no right to write there.
#   docker build -f docker/nviz.Dockerfile -t nviz .
#   docker run --rm --network host -v $PWD/runs:/home/nmoe/runs:ro nviz --runs runs
# It listens on 127.0.0.1 (here the host's, by --network host); put a proxy with authentication in front to share it.
FROM python:3.12-slim
RUN pip install --no-cache-dir uv==0.13.9 && useradd --create-home --uid 10001 nmoe
WORKDIR /opt/nmoe
COPY pyproject.toml uv.lock LICENSE NOTICE ./
COPY packages packages
RUN uv sync --locked --no-default-groups --package nviz --no-editable
ENV PATH=/opt/nmoe/.venv/bin:$PATH
USER nmoe
WORKDIR /home/nmoe
ENTRYPOINT ["nviz"]
CMD ["--runs", "runs"]
