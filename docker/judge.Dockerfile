# The judge: hydra-judge alone, without torch.
#   docker build -f docker/judge.Dockerfile -t hydra-judge .
#   docker run --rm -e OPENAI_API_KEY -v $PWD/data:/home/nmoe/data hydra-judge score data/corpus.jsonl ...
FROM python:3.12-slim
RUN pip install --no-cache-dir uv==0.13.9 && useradd --create-home --uid 10001 nmoe
WORKDIR /opt/nmoe
COPY pyproject.toml uv.lock LICENSE NOTICE ./
COPY packages packages
RUN uv sync --locked --no-default-groups --package hydra-judge --no-editable
ENV PATH=/opt/nmoe/.venv/bin:$PATH
USER nmoe
WORKDIR /home/nmoe
RUN mkdir data
ENTRYPOINT ["hydra-judge"]
CMD ["--help"]
