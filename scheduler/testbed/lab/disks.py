"""Faults of a file system, as shell scripts: each may run twice, and undoes only what it did. Pure."""

from __future__ import annotations

from deeplink.scheduler.testbed.settings import SSD

STORE = SSD / "deeplink"
"""Where a job's store is, by all that is written about sandboxes."""
_FULL = "/run/deeplink-full"
# A file system of 64 KiB, filled to the brim, lies over the SSD: what is there can be read, and nothing fits.
FILL = f"""set -e
mountpoint -q {_FULL} && exit 0
mkdir -p {_FULL}
mount -t tmpfs -o size=64k full {_FULL}
mkdir {_FULL}/upper {_FULL}/work
chmod --reference={SSD} {_FULL}/upper
chown --reference={SSD} {_FULL}/upper
mount -t overlay -o lowerdir={SSD},upperdir={_FULL}/upper,workdir={_FULL}/work full {SSD}
cat /dev/zero > {_FULL}/fill 2>/dev/null || true
"""
# What lies over the SSD alone is taken away: it is a mount itself, and filling it may have been broken off.
DRAIN = f"""mountpoint -q {_FULL} || exit 0
if grep -q '^full {SSD} overlay ' /proc/mounts; then umount -l {SSD}; fi
umount -l {_FULL}
"""
READ_ONLY = f"""set -e
test -e /run/deeplink-readonly && exit 0
mount --bind {SSD} {SSD}
mount -o remount,bind,ro {SSD}
touch /run/deeplink-readonly
"""
WRITABLE = f"test -e /run/deeplink-readonly || exit 0; rm /run/deeplink-readonly; umount -l {SSD}"
# Another user's folder lies over the one that is there, so that this one is back untouched, whoever ends us.
_SQUATTED = "/run/deeplink-squatted"
SQUAT = f"""set -e
mountpoint -q {STORE} && exit 0
if ! test -d {STORE}; then
    touch {_SQUATTED}
    mkdir -m 700 {STORE}
    chown --reference={SSD} {STORE}
fi
mount -t tmpfs -o size=64k,mode=0755,uid=65534,gid=65534 squatted {STORE}
touch {STORE}/theirs
chown 65534:65534 {STORE}/theirs
"""
LEAVE = f"""if grep -q '^squatted {STORE} tmpfs ' /proc/mounts; then umount -l {STORE}; fi
test -e {_SQUATTED} || exit 0
rmdir {STORE} 2> /dev/null
rm {_SQUATTED}
"""
# A file system of its own lies over the SSD, and is shut down (EXT4_IOC_SHUTDOWN): it answers everything with EIO.
_EIO = "/run/deeplink-eio"
FAIL = f"""set -e
mountpoint -q {_EIO} && exit 0
mkdir -p {_EIO}
mount -t tmpfs -o size=4m eio {_EIO}
truncate -s 2M {_EIO}/image
mkfs.ext4 -q {_EIO}/image
mount -o loop {_EIO}/image {SSD}
python3 -c 'import fcntl, os; fcntl.ioctl(os.open("{SSD}", os.O_RDONLY), 0x8004587D, b"\\2\\0\\0\\0")'
"""
WORK = f"""mountpoint -q {_EIO} || exit 0
if grep -q ' {SSD} ext4 ' /proc/mounts; then umount -l {SSD}; fi
umount -l {_EIO}
"""


def brim(folder: str) -> tuple[str, str]:
    """Return the scripts that fill the file system of a folder to the last byte, and that make room again."""
    fill = f"{folder}/.deeplink-full"
    # Never the host's own disk: the folder has to be a file system of its own.
    do = f"""mountpoint -q {folder} || {{ echo {folder} is no file system of its own >&2; exit 1; }}
fallocate -l $(df --output=avail -B1 {folder} | tail -1) {fill} 2>/dev/null
cat /dev/zero > {fill}.rest 2>/dev/null
sync -f {folder}
"""
    return do, f"rm -f {fill} {fill}.rest"


def sealed(folder: str) -> tuple[str, str]:
    """Return the scripts that make a folder read-only on one machine, and writable again; open files stay so."""
    mark = "/run/deeplink-sealed"
    seal = f"""set -e
test -e {mark} && exit 0
mount --bind {folder} {folder}
mount -o remount,bind,ro {folder}
touch {mark}
"""
    return seal, f"test -e {mark} || exit 0; rm {mark}; umount -l {folder}"
