"""The stores of a rendezvous: at a TCP port of rank 0, by files at a common path, or by MPI."""

import atexit
import errno
import ipaddress
import itertools
import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from socket import SO_ACCEPTCONN, SOL_SOCKET
from typing import Any, NamedTuple, NoReturn

from flashlight_py import interfaces, system
from flashlight_py.distributed.rendezvous import store
from flashlight_py.distributed.rendezvous.environment import LaunchEnvironment, detect
from flashlight_py.distributed.rendezvous.gate import LONGEST_PAUSE
from flashlight_py.distributed.rendezvous.secret import FLAGS, NONCE_BYTES, Secret, create_private
from flashlight_py.distributed.rendezvous.tree import TreeStore
from flashlight_py.distributed.rendezvous.wire import NoServerError, Offer, SilentError, claim
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import is_own, listen_everywhere, own_addresses, resolved

# Variable for rank 0's inherited listening socket. No other program can take its port.
LISTENER = "FLASHLIGHT_LISTENER"
"""Environment variable: descriptor of an inherited socket that listens at MASTER_PORT."""


class TcpStore(TreeStore):
    """A store at ``host``:``port``, an address of rank 0; ``timeout`` is in seconds per exchange.

    If MASTER_ADDR is an address, rank 0 listens only there; if it is a name, rank 0 listens at all
    addresses of its host. The other ranks try the addresses of MASTER_ADDR until rank 0 answers.
    Both sides prove that they know the job's secret, which is never sent. A job on several hosts
    may have no secret: then any process that can reach the port can join.

    If ``one_host``, all ranks are on one host, so they know the user's secret if the job has no
    secret. ``also`` are further addresses of rank 0. Raises ValueError if an argument is out of
    range. Raises RendezvousError like ``Secret.find``, or if rank 0 cannot listen at its address.
    """

    kind, run_option, is_common = "address", "MASTER_PORT", True

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout: float, one_host: bool = False,
        also: Sequence[str] = (),
    ) -> None:  # fmt: skip
        store.check_member(rank, size, timeout)
        if not 0 < port < 65536:
            raise ValueError(f"the port must be in [1, 65535], got {port}")
        self.name, self._host, self._port = f"{host}:{port}", host, port
        self._addresses = [(name, port) for name in dict.fromkeys([host, *also])]
        self.one_host = one_host
        self.job_secret = Secret.find(one_host, system.environ)
        self.secret = self.job_secret.common
        loopback: list[str] = []
        if is_local(host):
            with suppress(OSError):  # listen or connect raises the error later
                loopback = [str(address) for address, *_ in resolved(host, port)]
        super().__init__(rank, size, timeout, loopback)

    def remedy(self) -> str:
        advice = (
            "check that every rank was started with the same MASTER_ADDR and MASTER_PORT, and can "
            "reach that address"
        )
        if self.note:
            return f"{advice}. Rank 0 listens at {self._host}{self.note}"
        if self.rank == 0 or self.one_host:
            return advice
        with suppress(OSError):
            ends = [end for address in self._addresses for end in resolved(*address)]
            if all(is_own(end[0], end[2:]) for end in ends):
                advice += (
                    f". Here {self._host} is this host ({system.gethostname()}). If rank 0 runs on "
                    "another host, set MASTER_ADDR to a name or address of that host on every rank"
                )
        return advice

    def listen(self, backlog: int) -> list[system.Socket]:
        """Listen at the address ``host``; if it is a name, at all addresses of this host."""
        listeners = create_listeners(self._host, self._port, backlog, self.one_host)
        if not self.one_host and all(is_local(listener.getsockname()[0]) for listener in listeners):
            self.note = f", the loopback of {system.gethostname()}, which other hosts cannot reach"
        return listeners

    def offers(self) -> list[Offer]:
        return [Offer(self._addresses, self.job_secret, advice="; set another MASTER_PORT")]


# Address of rank 0 -------------------------------------------------------------------------------


def create_listeners(host: str, port: int, backlog: int, one_host: bool) -> list[system.Socket]:
    """Return sockets that listen at ``port`` of this host; the caller closes them.

    If ``one_host``, or if ``host`` is an address or the loopback, listen at the addresses of
    ``host``. Otherwise listen at all addresses, because other hosts may resolve the name ``host``
    differently. Raises OSError with a remedy if ``host`` is another host, or the port is in use.
    """
    if (listener := _inherited_listener(port)) is not None:
        return [listener]
    try:
        addresses = resolved(host, port)
    except OSError as error:
        raise OSError(f"cannot resolve MASTER_ADDR: {error}") from error
    try:
        if one_host or is_local(host) or _is_address(host):
            return _listen_at(addresses, backlog)
        if any(is_own(address[0], address[2:]) for address in addresses):
            return [listen_everywhere(port, backlog)]
        raise OSError(errno.EADDRNOTAVAIL, "")
    except OSError as error:
        raise OSError(_bind_problem(error)) from error


def _listen_at(addresses: Sequence[tuple[Any, ...]], backlog: int) -> list[system.Socket]:
    """Listen at each of ``addresses`` that belongs to this host. Raise OSError if none does."""
    listeners, problem = [], OSError(errno.EADDRNOTAVAIL, "")
    for address in addresses:
        try:
            # create_server sets SO_REUSEADDR. Otherwise the port of a run that has just ended would
            # be blocked for a minute.
            family = interfaces.family_of(address[0])
            listeners.append(system.create_server(address, family=family, backlog=backlog))
        except OSError as error:  # noqa: PERF203 - an error for each address
            problem = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for listener in listeners:
                    listener.close()
                raise
    if not listeners:
        raise problem
    return listeners


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Return whether ``host`` is "localhost" or a loopback address."""
    return host == "localhost" or (
        _is_address(host) and interfaces.is_loopback(host.partition("%")[0])
    )


def _inherited_listener(port: int) -> system.Socket | None:
    """Return a copy of the socket that the launcher passed for ``port``, or None.

    The original socket remains for a later ``distributed_init``. If a process inherited the
    variable but not the socket, the descriptor may belong to another file.
    """
    text = system.environ.get(LISTENER, "")
    descriptor = int(text) if text.isdecimal() else -1
    try:
        if not stat.S_ISSOCK(system.fstat(descriptor).st_mode):
            return None
    except OSError:
        return None
    listener = system.Socket(fileno=system.dup(descriptor))
    is_listening = listener.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)
    if is_listening and listener.getsockname()[1:2] == (port,):
        system.set_inheritable(descriptor, False)
        return listener
    listener.close()
    return None


def _bind_problem(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        advice = "Set another MASTER_PORT on every rank"
        return f"the port is in use by another program or a second rank 0. {advice}"
    if error.errno == errno.EADDRNOTAVAIL:
        advice = "Set it to an address that the other hosts can reach"
        return f"MASTER_ADDR is not an address of this host, where rank 0 runs. {advice}"
    return f"cannot listen: {os.strerror(error.errno or 0)}. Set another MASTER_PORT"


# Files --------------------------------------------------------------------------------------------

# Seconds to wait for an answer from an announced rank 0. The short value is for one rank 0 that
# contacts another: if both start at the same time, each waits for the other.
_PATIENCE, _SHORT_PATIENCE = 2.0, 0.25

LOOPBACK = "127.0.0.1"
VERSION = 3  # version of the announcement format

_NONCE = "[0-9a-f]{16}"
# By kind of file: pattern of the part of the file name after the run.
_FORMS = {"run": r"-\d+", "ask": rf"-{_NONCE}", "tmp": r"-\d+"}


class Name(NamedTuple):
    """Parts of a file name. ``rest`` is a number, or the nonce of the asking rank (kind "ask")."""

    kind: str
    run: str
    rest: str

    def __str__(self) -> str:
        return "-".join(self)


class Announcement(NamedTuple):
    """Announcement by rank 0: its process, its addresses, and the secret of its run."""

    peer: store.Peer
    addresses: list[tuple[str, int]]
    secret: str

    def pack(self) -> bytes:
        return json.dumps({"version": VERSION, **self._asdict()}).encode()

    @classmethod
    def parse(cls, content: bytes) -> "Announcement":
        """Return the announcement in ``content``; raises ValueError if it is invalid."""
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:  # e.g. nested too deeply
            raise ValueError("must be a complete announcement") from error
        version = record.get("version") if isinstance(record, dict) else None
        if version != VERSION:
            raise ValueError(f"must have announcement version {VERSION}, got {version!r}")
        try:
            pairs = record["addresses"]
            addresses = [(str(ipaddress.ip_address(host)), port) for host, port in pairs]
            bytes.fromhex(record["secret"])
            peer = store.Peer(*record["peer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("must have all fields of an announcement") from error
        if not all(port in range(1, 65536) for _, port in addresses):
            raise ValueError("must have ports in [1, 65535]")
        return cls(peer, addresses, record["secret"])


class SharedDirectory:
    """The files of one rendezvous path: ``<name>.<kind>-<run>-...`` in one directory.

    Files never change, since NFS clients cache them by name. A file is created exclusively under a
    temporary name, closed (an NFS client sends everything at close) and renamed. It therefore
    appears completely or not at all. The content is JSON.

    If ``path`` is an existing directory, it contains the files, and ``<name>`` is ``flashlight``.
    Otherwise the files are next to ``path``, and ``<name>`` is its last part. ``nonce`` is random
    for every object. Raises RendezvousError if the directory does not exist, or no file can be
    created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        # os.path returns False without permission, but Path raises.
        inside = os.path.isdir(self.path)
        self._directory = self.path if inside else self.path.parent
        self._prefix = ("flashlight" if inside else self.path.name) + "."
        forms = "|".join(f"{kind}-{_NONCE}{rest}" for kind, rest in _FORMS.items())
        self._names = re.compile(re.escape(self._prefix) + f"({forms})", re.ASCII)
        self.nonce = system.random_bytes(8).hex()
        self._counter = itertools.count()
        self._cache: dict[Name, Announcement] = {}
        self.ignored: dict[str, str] = {}  # ignored files, with the reason
        # User id of files that this process creates. An NFS server may map root to nobody.
        try:
            probe = self._make_temporary(b"")
            self._owner = probe.lstat().st_uid
            probe.unlink(missing_ok=True)
        except OSError as error:
            self._raise("create files in", error)

    def names(self) -> set[Name]:
        """Return the names of all existing files.

        An NFS client caches a listing for up to a minute. This method creates a file: that changes
        the directory, so the client asks the server again. A name is opened only after a listing
        contains it. Otherwise a cached "no such file" could hide the file.
        """
        try:
            self._make_temporary(b"").unlink(missing_ok=True)
            matches = map(self._names.fullmatch, os.listdir(self._directory))
            return {Name(*match[1].split("-")) for match in matches if match}
        except OSError as error:
            self._raise("list", error)

    def write(self, name: Name, content: bytes = b"") -> None:
        """Create the file ``name`` with its complete ``content`` in one atomic step."""
        try:
            temporary = self._make_temporary(content)
            with suppress(FileNotFoundError):  # removed by a later run's rank 0
                temporary.rename(self._file(name))
        except OSError as error:
            self._raise(f"create {name} in", error)

    def read(self, name: Name, again: bool = False) -> "Announcement | None":
        """Return the announcement in ``name``; None if unreadable. ``again``: read it once more."""
        if again or name not in self._cache:
            try:
                with open(os.open(self._file(name), os.O_RDONLY | FLAGS), "rb") as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode) or status.st_uid != self._owner:
                        raise ValueError("must be a regular file of this user")
                    self._cache[name] = Announcement.parse(file.read())
            except (OSError, ValueError) as error:
                self.ignored[str(name)] = _read_problem(error)
                return None
        return self._cache[name]

    def remove(self, name: Name) -> None:
        """Remove the file ``name`` if it exists and this user may remove it."""
        try:
            self._file(name).unlink(missing_ok=True)
        except OSError as error:
            self.ignored[str(name)] = f"could not be removed ({error.strerror})"

    def _file(self, name: Name) -> Path:
        return self._directory / f"{self._prefix}{name}"

    def _make_temporary(self, content: bytes) -> Path:
        path = self._file(Name("tmp", self.nonce, str(next(self._counter))))
        create_private(path, content)
        return path

    def _raise(self, doing: str, error: OSError) -> NoReturn:
        raise RendezvousError(
            f"rendezvous at {self.path}: cannot {doing} {self._directory}: {error.strerror}. "
            "Set FILE_PATH to a path whose parent directory exists and is writable for every rank"
        ) from error


def _read_problem(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return "belongs to another user or may not be read"
    return f"cannot be opened ({error.strerror})" if isinstance(error, OSError) else str(error)


class FileStore(TreeStore):
    """A store at ``path``, which every rank must see; ``timeout`` is in seconds per exchange.

    Rank 0 listens on the loopback, and announces its run in a file with a random name. The file
    contains the address and process of rank 0, and a secret of the run. Only the user can read the
    file, so a process that knows the secret is a rank. The other ranks connect to the address. If a
    rank gets no answer, it may be on another host. It then creates a file that asks rank 0 to
    listen on its other addresses and to announce them.

    Ranks ignore files of a dead run: the process of its rank 0 has ended, or its address rejects
    connections, or another program without the secret listens there. Rank 0 removes such files when
    it ends. A rank that finds no rank 0 keeps looking, so a rank 0 that died during the rendezvous
    may be restarted. Rank 0 also connects to the rank 0 of every other run. If that process is
    alive, it answers that two processes claim rank 0, or that its run has started. A rank has one
    connection, so only one of two runs at a path can become complete. File times are not used:
    clocks may differ.

    For ``path`` see ``SharedDirectory``. The user prepares and removes nothing, even after a killed
    run. Files of other users are ignored. Raises ValueError like ``check_member``, and
    RendezvousError like ``SharedDirectory`` or if there is no loopback network.
    """

    kind, run_option, can_move, patience = "path", "FILE_PATH", True, _PATIENCE

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int, timeout: float) -> None:
        store.check_member(rank, size, timeout)
        self._directory = SharedDirectory(path)
        self.name, self.run = str(self._directory.path), self._directory.nonce
        self.job_secret = self._secret(system.random_bytes(NONCE_BYTES).hex())
        self.secret = self.job_secret.common
        self._listeners: list[system.Socket] = []
        self._announced: Name | None = None
        self._announcement = Announcement(store.this_process(), [], "")
        self.next_poll = 0.0
        # Names of other runs. ``_earlier``: their files existed before this run. ``_alive``: their
        # rank 0 is alive. ``_contacted``: rank 0 of this run has contacted their rank 0.
        self._earlier: set[str] = set()
        self._alive: set[str] = set()
        self._contacted: set[str] = set()
        # ``_failures``: number of failed connections, by run. ``_ask_files``: see ``failed``.
        self._failures: Counter[str] = Counter()
        self._ask_files: set[Name] = set()
        super().__init__(rank, size, timeout, [LOOPBACK])

    def remedy(self) -> str:
        ignored = "; ".join(f"{name} {why}" for name, why in self._directory.ignored.items())
        return (
            "start every rank with the same FILE_PATH and world size, on hosts that reach rank 0"
            f"{f' (ignored files: {ignored})' if ignored else ''}"
        )

    # Rank 0 ---------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> list[system.Socket]:
        self._backlog = backlog
        self._listeners.append(system.create_server((LOOPBACK, 0), backlog=backlog))
        return list(self._listeners)

    def poll(self) -> system.Socket | None:
        """Restore a lost announcement and contact other runs. If a rank asks, listen everywhere."""
        names = self._directory.names()
        if self._announced is None:
            self._earlier = {name.run for name in names}
        current = self._announced
        if current not in names or self._directory.read(current, again=True) != self._announcement:
            self._announce()
            names = self._directory.names()
        for offer in self._other_offers(names):
            if offer.run not in self._contacted:
                self._contacted.add(offer.run)
                self._contact_rival(offer)
        self.next_poll = system.monotonic() + LONGEST_PAUSE
        is_asked = any(name.kind == "ask" and name.run == self.run for name in names)
        if not is_asked or len(self._listeners) > 1:
            return None
        self._listeners.append(listen_everywhere(0, self._backlog))
        self._announce()
        return self._listeners[-1]

    def _announce(self) -> None:
        """Write rank 0's addresses to a new file, since files never change; remove the old file."""
        previous = self._announced
        self._announced = Name("run", self.run, str(int(previous.rest) + 1 if previous else 0))
        first, *more = (int(listener.getsockname()[1]) for listener in self._listeners)
        outside = ((host, port) for port in more for host in own_addresses())
        addresses = [(LOOPBACK, first), *outside]
        secret = self.job_secret.from_job.decode()
        self._announcement = Announcement(store.this_process(), addresses, secret)
        self._directory.write(self._announced, self._announcement.pack())
        if previous is not None:
            self._directory.remove(previous)

    def _contact_rival(self, offer: Offer) -> None:
        """Contact the rank 0 of another run. If it rejects this rank 0, raise RendezvousError."""
        patience = _PATIENCE if offer.run < self.run else _SHORT_PATIENCE
        try:
            reason = claim(offer, self.size, patience)
        except SilentError:
            reason = ""
        except NoServerError:
            return
        self._alive.add(offer.run)
        if reason:
            raise self.error(reason)

    # Other ranks ---------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """Return the announced addresses, sorted by their number of failures."""
        offers = self._other_offers(self._directory.names())
        return sorted(offers, key=lambda offer: self._failures[offer.run])

    def failed(self, offer: Offer) -> None:
        """Ask the rank 0 of ``offer`` to listen on addresses that other hosts can reach."""
        self._failures[offer.run] += 1
        ask = Name("ask", offer.run, self.run)
        if len(offer.addresses) == 1 and ask not in self._ask_files:
            self._ask_files.add(ask)
            self._directory.write(ask)

    # Every rank -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove the files of this process. Rank 0 also removes files of dead older runs."""
        for ask in self._ask_files:
            self._directory.remove(ask)
        if self._announced is None:
            return
        dead = (self._earlier - self._alive) | {self.run}
        files = [name for name in self._directory.names() if name.run in dead]
        # Remove announcements first, so that no rank connects to a run that ends.
        for name in sorted(files, key=lambda name: name.kind != "run"):
            self._directory.remove(name)

    def _other_offers(self, names: set[Name]) -> Iterator[Offer]:
        """Yield the newest announcement of each other run whose rank 0 may be alive."""
        editions = sorted((int(name.rest), name) for name in names if name.kind == "run")
        for name in {name.run: name for _, name in editions if name.run != self.run}.values():
            announcement = self._directory.read(name)
            if announcement is not None and not announcement.peer.is_gone():
                peer, addresses, secret = announcement
                text = ", ".join(f"{host}:{port}" for host, port in addresses)
                source = f"at {text}, announced by {peer}: "
                yield Offer(addresses, self._secret(secret), name.run, source)

    def _secret(self, text: str) -> Secret:
        return Secret(text.encode(), source=f"a file at {self._directory.path}")


# MPI ----------------------------------------------------------------------------------------------


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI; MPI is finalised when this process exits.

    Raises BackendUnavailableError if mpi4py or its MPI library is missing, MPI is not initialised,
    or MPI has been finalised.
    """
    finalizes = False
    try:
        import mpi4py

        # If the program imported mpi4py.MPI or set rc.finalize, keep its choice.
        finalizes = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
        if finalizes:
            mpi4py.rc.finalize = False  # forked children would finalise as well
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no libmpi
        raise BackendUnavailableError(
            f"MPI needs mpi4py and an MPI library, which cannot be loaded: {error}. Install both "
            "with: pip install 'flashlight-py[mpi]'"
        ) from error
    if finalizes:
        atexit.register(_finalize, MPI, system.getpid())
    if not MPI.Is_initialized():
        raise BackendUnavailableError(
            "MPI is not initialised: mpi4py.rc.initialize is False. Set it to True, or call "
            "MPI.Init_thread() before distributed_init"
        )
    if MPI.Is_finalized():
        raise BackendUnavailableError(
            "MPI has been finalised in this process and cannot be initialised again. Do not call "
            "MPI.Finalize(): mpi4py calls it at exit"
        )
    return MPI


def _finalize(mpi: Any, pid: int) -> None:
    """Finalise MPI at exit, but not in a forked child: its parent still uses MPI."""
    if system.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def check_world(declared: LaunchEnvironment | None, size: int) -> None:
    """Raise RendezvousError if the environment declares several ranks, but MPI only one."""
    if declared is None or declared.size == 1 or size > 1:
        return
    raise RendezvousError(
        f"the environment says rank {declared.rank} of {declared.size} ({declared.source}), but "
        "MPI has 1 rank: one MPI started the process, and mpi4py loaded another. Use the mpirun of "
        "mpi4py's library (python -m mpi4py --mpi-lib-version shows it), or build mpi4py for the "
        "MPI of mpirun: pip install --no-binary=mpi4py mpi4py"
    )


# MPI sends only rank 0's address. The tree of connections detects missing ranks and aborts.
class MpiStore(TreeStore):
    """A store over ``MPI.COMM_WORLD``, which gives rank and size. Initialises MPI.

    MPI sends rank 0's address and a secret of this run to all ranks. Blocks until all ranks have
    called. ``timeout`` is in seconds for each exchange.

    Raises BackendUnavailableError like ``load_mpi``, RendezvousError like ``check_world``, and
    ValueError like ``detect``.
    """

    name, kind, run_option = "MPI", "world of MPI", "mpirun"

    def __init__(self, timeout: float) -> None:
        world = load_mpi().COMM_WORLD
        rank, size = int(world.Get_rank()), int(world.Get_size())
        check_world(detect(), size)
        hosts = world.allgather(store.host_identity())
        self._one_host, self.local_rank = len(set(hosts)) == 1, hosts[:rank].count(hosts[rank])
        self._addresses: list[tuple[str, int]] = []
        self.secret = world.bcast(system.random_bytes(NONCE_BYTES).hex().encode(), 0)
        self.job_secret = Secret(self.secret, source=self.name)
        try:
            super().__init__(rank, size, timeout, [LOOPBACK] if self._one_host else [])
        finally:  # otherwise the other ranks would wait forever
            self._addresses = world.bcast(self._addresses, 0)

    def listen(self, backlog: int) -> list[system.Socket]:
        """Listen on the loopback, or on all addresses if there are other hosts."""
        if self._one_host:
            listener, hosts = system.create_server((LOOPBACK, 0), backlog=backlog), [LOOPBACK]
        else:
            listener, hosts = listen_everywhere(0, backlog), own_addresses()
            if not hosts:
                raise OSError("this host has no address that other hosts could reach")
        port = int(listener.getsockname()[1])
        self._addresses = [(host, port) for host in hosts]
        return [listener]

    def offers(self) -> list[Offer]:
        if not self._addresses:
            raise self.error("rank 0 cannot listen for connections. Read the output of rank 0")
        return [Offer(self._addresses, self.job_secret)]

    def remedy(self) -> str:
        return "check whether a rank has raised or is still computing"
