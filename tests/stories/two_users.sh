# Two users of a site: the first one's account runs the standing agents and packs, the second one reads.
# Run by root, who plays both: two_users.sh FIRST SECOND. Users ask the agent of their node at its socket.
first=$1 second=$2 site=$PWD
as() {
    user=$1 home=$2
    shift 2
    setpriv --reuid "$user" --regid "$(id -g "$user")" --clear-groups --pdeathsig TERM \
        env -C "$home" HOME="$home" USER="$user" LOGNAME="$user" DEEPLINK_CONFIG="$site/config.toml" "$@"
}
mkdir -p -m 1777 catalog
mkdir other
chown "$second" other
as "$first" "$site" deeplink demo --write-digits digits
as "$first" "$site" cp -r digits secret
find secret -type f -exec sh -c 'for file; do echo >>"$file"; done' - {} +
chmod -R u=rwX,go=rX digits
chmod 0700 secret
as "$first" "$site" mkdir standing
as "$first" "$site" bash -c 'umask 077; python -c "import secrets; print(secrets.token_urlsafe(32))" >standing/token'
cat >standing/agent.sh <<'AGENT'
#!/bin/bash
mkdir -p -m 0755 /local/ssd/site
exec deeplink node --bind 0.0.0.0:7411
AGENT
chmod +x standing/agent.sh
members=
for node in n0 n1 n2; do
    members=$members,$node=$(getent hosts $node | awk '{print $1; exit}'):7411
done
cat >config.toml <<CONFIG
catalog = "$site/catalog"
store = "/local/ssd/store-\$USER"
state = "\$HOME/state"
members = "${members#,}"
token_file = "$site/standing/token"
node_socket = "/local/ssd/site/agent.sock"
CONFIG
as "$first" "$site" srun -N3 -w n0,n1,n2 --overlap --ntasks-per-node=1 standing/agent.sh >standing/log 2>&1 &
trap 'kill %1; wait' EXIT
until [ "$(grep -c '"address"' standing/log)" = 3 ]; do
    kill -0 %1 || { cat standing/log; exit 1; }
    sleep 0.2
done
as "$first" "$site" deeplink pack digits digits
as "$first" "$site" deeplink pack secret secret
as "$second" "$site/other" srun -N1 -w n1 --overlap python "$site/epochs.py" digits 6
# No agent runs on n3, and the token of the others is not the second user's to read: MUNGE tells them who he is.
as "$second" "$site/other" srun -N1 -w n3 --overlap python "$site/epochs.py" digits 6
cat >other/secret.py <<'SECRET'
import deeplink

try:
    deeplink.Dataset("secret")[0]
except PermissionError as refused:
    print("refused:", type(refused).__name__, refused)
SECRET
as "$second" "$site/other" srun -N1 -w n1 --overlap python secret.py
as "$second" "$site/other" srun -N1 -w n3 --overlap python secret.py
as "$first" "$site" srun -N1 -w n1 --overlap python "$site/epochs.py" secret 1
as "$second" "$site/other" srun -N1 -w n3 --overlap rm -r "/local/ssd/store-$second"
# The second user's job has agents of his own: on n1 the standing one looks after the data, on n3 his.
as "$second" "$site/other" salloc -N2 -w n1,n3 deeplink run --nproc-per-node 1 -- python "$site/epochs.py" digits 4
