"""Runs a command, its arguments, without IPv6 sockets, like on a kernel without IPv6.

A filter of seccomp(2) rejects these sockets with the error of such a kernel.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# By machine, the number of the system call socket(2).
SOCKET = {"x86_64": 41, "aarch64": 198}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of classic BPF
_NUMBER_AT, _FAMILY_AT = 0, 16  # in struct seccomp_data
_ERRNO, _ALLOW = 0x0005_0000, 0x7FFF_0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def main() -> None:
    steps = (
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 3, SOCKET[platform.machine()]),
        (_LOAD, 0, 0, _FAMILY_AT),
        (_JUMP_IF_EQUAL, 0, 1, 10),  # AF_INET6
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            sys.exit(f"seccomp is not available: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
