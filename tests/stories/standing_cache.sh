# A site's standing agents hold the data; jobs bring agents of their own, on nodes with a standing one and without.
deeplink demo --write-digits digits
mkdir -p standing
(umask 077; python -c 'import secrets; print(secrets.token_urlsafe(32))' >standing/token)
cat >standing/agent.sh <<AGENT
#!/bin/bash
mkdir -p -m 0755 /local/ssd/site
export DEEPLINK_NODE_SOCKET=/local/ssd/site/agent.sock
exec deeplink node --bind 0.0.0.0:7411 --token-file $PWD/standing/token --store /local/ssd/standing
AGENT
chmod +x standing/agent.sh
srun -N2 -w n0,n1 --overlap --ntasks-per-node=1 standing/agent.sh >standing/log 2>&1 &
trap 'kill %1; wait' EXIT
until [ "$(grep -c '"address"' standing/log)" = 2 ]; do sleep 0.2; done
members=
for node in n0 n1; do
    members=$members,$node=$(getent hosts $node | awk '{print $1; exit}'):7411
done
cat >.config/deeplink/config.toml <<CONFIG
store = "/local/ssd/deeplink"
members = "${members#,}"
token_file = "$PWD/standing/token"
node_socket = "/local/ssd/site/agent.sock"
CONFIG
deeplink pack --no-home digits digits
run() {
    echo "job on $1"
    salloc -N "$2" -w "$1" deeplink run --nproc-per-node 1 -- python epochs.py digits 4
}
run n0,n1 2 # all of its nodes have a standing agent
run n1,n2 2 # one of them
run n3 1    # none
echo "plain on n0"
srun -N1 -w n0 --overlap python epochs.py digits 2
srun -N1 -w n3 --overlap rm -r /local/ssd/deeplink
echo "plain on n3"
sbatch --wait -o array-%a -w n3 --array=0 --wrap "python epochs.py digits 4"
cat array-0
