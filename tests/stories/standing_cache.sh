# A site's standing agents hold the data; a job on these nodes brings agents of its own.
deeplink demo --write-digits digits
mkdir -p standing
(umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' >standing/token)
cat >standing/agent.sh <<AGENT
#!/bin/bash
exec deeplink node --bind 0.0.0.0:7411 --token-file $PWD/standing/token --store /local/ssd/standing
AGENT
chmod +x standing/agent.sh
srun -N3 -w n0,n1,n2 --overlap --ntasks-per-node=1 standing/agent.sh >standing/log 2>&1 &
trap 'kill %1; wait' EXIT
until [ "$(grep -c '"address"' standing/log)" = 3 ]; do sleep 0.2; done
members=
for node in n0 n1 n2; do
    members=$members,$node=$(getent hosts $node | awk '{print $1; exit}'):7411
done
cat >.config/deeplink/config.toml <<CONFIG
store = "/local/ssd/deeplink"
members = "${members#,}"
token_file = "$PWD/standing/token"
CONFIG
deeplink pack digits digits
srun -N1 -w n1 --overlap python epochs.py digits 1
salloc -N2 -w n0,n1 deeplink run --nproc-per-node 1 -- python epochs.py digits 2
