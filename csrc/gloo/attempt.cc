#include "attempt.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>

#include "links.h"

namespace fl {
namespace {

// The other end has closed the connection, or does not belong to this group: one that belongs to it may
// come.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

}  // namespace

Attempt::Attempt(Links& links, int socket, int peer, std::optional<uint64_t> asks_of)
    : socket(socket),
      is_ours(peer >= 0),
      peer(peer),
      asks_of(asks_of),
      links_(links),
      is_connected_(peer < 0) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Attempt::~Attempt() {
  if (!is_taken) close(socket);
}

void Attempt::cancel() noexcept { shutdown(socket, SHUT_RDWR); }

void Attempt::handleEvents(int) {
  try {
    serve();
  } catch (const Refused& error) {
    links_.ended(*this, error.what(), true);
  } catch (const std::exception& error) {
    links_.ended(*this, error.what(), false);
  }
}

// After ended() it is not there any more.
void Attempt::serve() {
  if (!is_connected_) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) fail(error);
    is_connected_ = true;
    greet();
    links_.listen_to(*this);
    return;
  }
  if (!receive()) return;
  if (is_ours) {
    if (!links_.prover_.is_shown_by(peer, theirs_.proof)) throw std::runtime_error(kStranger);
    calls = theirs_.calls;
  } else {
    peer = theirs_.rank;
    if (theirs_.asks != 0) asks_of = theirs_.group;
    if (peer < 0 || peer >= links_.size || peer == links_.rank) throw Refused("no rank");
    if (!links_.prover_.is_shown_by(peer, theirs_.proof)) {
      answer(Greeting{});  // who is mistaken finds no proof in it, and a stranger learns nothing
      throw Refused(kStranger);
    }
    if (!asks_of && !links_.has_place(*this)) throw Refused("there is one");
    greet();
  }
  if (!asks_of) links_.adopt(*this);
  links_.ended(*this, {}, false);
}

void Attempt::greet() {
  Greeting mine{links_.rank, asks_of ? 1 : 0, asks_of.value_or(0), 0, {}};
  if (!is_ours && asks_of) mine.calls = links_.calls_(*asks_of);
  std::memcpy(mine.proof, links_.prover_.shown_to(peer).data(), sizeof mine.proof);
  answer(mine);
}

void Attempt::answer(const Greeting& greeting) {
  const ssize_t sent = send(socket, &greeting, sizeof greeting, MSG_NOSIGNAL);  // a new socket has room
  if (sent != sizeof greeting) throw Refused("the connection broke");
}

// Not a byte more: what follows is for Gloo.
bool Attempt::receive() {
  char* const into = reinterpret_cast<char*>(&theirs_) + received_;
  const ssize_t count = recv(socket, into, sizeof theirs_ - received_, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count <= 0) throw Refused("the connection was closed");
  received_ += count;
  return received_ == sizeof theirs_;
}

}  // namespace fl
