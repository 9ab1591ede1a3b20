#!/bin/bash
# Starts Ceph's S3 gateway on 127.0.0.1 over one object store in memory, and prints "ready" when it answers; it ends
# when its standard input is closed.
#
# usage: ceph.sh <new folder> <port of the monitor> <port of S3> <access key> <secret key>
set -euo pipefail
folder=$1 monitor=$2 gateway=$3 access=$4 secret=$5
name=00000000-0000-0000-0000-000000000001
mkdir -p "$folder"/{mon,mgr,osd,run,log}
export CEPH_CONF=$folder/ceph.conf
cat >"$CEPH_CONF" <<CONF
[global]
fsid = $name
mon host = 127.0.0.1:$monitor
mon initial members = a
run dir = $folder/run
log file = $folder/log/\$name.log
admin socket = $folder/run/\$name.\$pid.asok
keyring = $folder/keyring
mon data = $folder/mon
mgr data = $folder/mgr
osd data = $folder/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
ms bind ipv6 = false
public addr = 127.0.0.1
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$gateway
CONF
key() { ceph-authtool "$folder/keyring" --gen-key --name "$1" "${@:2}" >>"$folder/log/start" 2>&1; }
ceph-authtool --create-keyring "$folder/keyring" >"$folder/log/start" 2>&1
key mon. --cap mon 'allow *'
key client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
key osd.0 --cap mon 'allow profile osd' --cap osd 'allow *' --cap mgr 'allow profile osd'
key mgr.x --cap mon 'allow profile mgr' --cap osd 'allow *'
key client.rgw --cap mon 'allow rwx' --cap osd 'allow rwx' --cap mgr 'allow rw'

daemons=()
# shellcheck disable=SC2317  # the trap calls it
stop() { kill "${daemons[@]}" 2>/dev/null || true; }
trap stop EXIT
start() {
    "$@" --foreground >>"$folder/log/start" 2>&1 </dev/null &
    daemons+=($!)
}
{
    monmaptool --create --add a "127.0.0.1:$monitor" --fsid "$name" "$folder/monmap"
    ceph-mon --mkfs --id a --monmap "$folder/monmap" --keyring "$folder/keyring"
} >>"$folder/log/start" 2>&1
start ceph-mon --id a
start ceph-mgr --id x
ceph osd new "$name" 0 >>"$folder/log/start" 2>&1
ceph-osd --id 0 --mkfs --osd-uuid "$name" --key "$(ceph-authtool "$folder/keyring" --name osd.0 --print-key)" \
    >>"$folder/log/start" 2>&1
start ceph-osd --id 0
start radosgw --name client.rgw
until curl --silent --output /dev/null "http://127.0.0.1:$gateway"; do
    kill -0 "${daemons[@]}"
    sleep 0.2
done
radosgw-admin user create --uid user --display-name user --access-key "$access" --secret "$secret" \
    >>"$folder/log/start" 2>&1
echo ready
cat >/dev/null
