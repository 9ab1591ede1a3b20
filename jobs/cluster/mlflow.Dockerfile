# The MLflow server of compose.yaml, in the version of the clients in constraints.txt, with packages for its options.
# Built and run with Docker and Podman on base images made from Debian 12 and 13; not yet on the official image.
# The build context is the repository's root: docker build -f jobs/cluster/mlflow.Dockerfile .
FROM python:3.11.15-slim-trixie
COPY constraints.txt /tmp/constraints.txt
# psycopg2 is for PostgreSQL, boto3 for the object store, Flask-WTF for MLflow's basic authentication.
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt \
        mlflow psycopg2-binary boto3 Flask-WTF==1.3.0 \
    && useradd --uid 1000 --create-home mlflow
USER 1000:1000
WORKDIR /home/mlflow
CMD ["mlflow", "server", "--help"]
