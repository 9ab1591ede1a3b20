#!/usr/bin/env bash
# A PostgreSQL server for tests, from Debian's package (apt-get install postgresql), on loopback.
#
#   postgres.sh start <empty folder> <port>     prints the database's URI once it takes connections
#   postgres.sh stop <folder>
set -euo pipefail
action=$1 folder=$2
bin=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1)

# The server refuses to run as root.
as_owner() {
    if [[ $(id -u) -eq 0 ]]; then
        runuser -u postgres -- "$@"
    else
        "$@"
    fi
}

case $action in
    start)
        port=$3
        [[ $(id -u) -ne 0 ]] || chown postgres "$folder"
        password=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
        (umask 077 && printf '%s' "$password" >"$folder/password")
        [[ $(id -u) -ne 0 ]] || chown postgres "$folder/password"
        as_owner "$bin/initdb" --pgdata="$folder/data" --username=mlflow --auth=scram-sha-256 \
            --pwfile="$folder/password" --no-sync >"$folder/log" 2>&1
        as_owner "$bin/pg_ctl" --pgdata="$folder/data" --log="$folder/data/server.log" --wait --timeout=60 \
            --options="-c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories='' -c fsync=off" \
            start >>"$folder/log" 2>&1
        echo "postgresql+psycopg2://mlflow:$password@127.0.0.1:$port/postgres"
        ;;
    stop)
        as_owner "$bin/pg_ctl" --pgdata="$folder/data" --mode=immediate --wait stop
        ;;
    *)
        echo "postgres.sh: found $action, must be start or stop" >&2
        exit 2
        ;;
esac
