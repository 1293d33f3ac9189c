// A connection of Gloo's, with what Gloo has no name for, and with messages of many groups.
//
// Gloo has the socket, its thread and the queue of what is to be sent. The protocol is our own: a receiver
// says that it is ready, and the sender sends; Gloo's sender says before that it will, which is of use only
// to who receives from any rank, and it searches all slots with every message. And what was begun in a group
// that has ended must not stand in the way of others: see forget.
#pragma once

#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/loop.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>
#include <sys/socket.h>

#include <list>
#include <unordered_map>

#include "../common/operation.h"

namespace fl {

// No other file includes Gloo's internal headers. Connections of a group; Gloo's thread, which serves their
// sockets; and what it calls with the events of a socket.
using Context = gloo::transport::tcp::Context;
using Device = gloo::transport::tcp::Device;
using Handler = gloo::transport::tcp::Handler;

std::shared_ptr<Device> create_device(const std::string& host, const std::string& interface);
// Its epoll, which Gloo does not expose, and leaves open on exec and in forked children, where it would hide that
// a rank was killed.
int descriptor_of(const Device& device);
// A socket that listens where the device is. Throws.
int listening_socket(const Device& device);
// Addresses as Gloo writes them.
std::vector<char> address_of(int socket);
sockaddr_storage read_address(const char* address, size_t bytes);

class Receiver;

// Bytes that travel as one. Room for more is left as it is.
struct Parcel {
  explicit Parcel(size_t bytes) : memory(new char[bytes]), bytes(bytes) {}

  std::unique_ptr<char[]> memory;
  size_t bytes;
};

// Who sends and receives parcels. All is called with a pair locked: no other lock may be waited for that somebody
// holds who needs a pair.
class Parcels {
 public:
  virtual ~Parcels() = default;

  // `is_over`: the group is, here.
  virtual void received(int peer, uint64_t group, bool is_over, Parcel parcel) = 0;
  // So many bytes are in the kernel's hands.
  virtual void sent(int peer, size_t bytes) = 0;
  // The connection has ended.
  virtual void ended(int peer) noexcept = 0;
};

class Pair : public gloo::transport::tcp::Pair {
 public:
  // The other end, rank `peer`, tells `text` of a group that is not over here: on Gloo's thread or one that
  // reads, with the pair locked.
  using Told = std::function<void(int peer, uint64_t group, const std::string& text)>;

  // `socket` is connected. Throws if the other end has closed it; then `socket` stays open.
  Pair(Context* context, Device* device, int peer, int socket, Told told, Parcels& parcels);
  ~Pair() override;

  // Whether Gloo's thread reads what arrives; it does from the beginning.
  void is_served(bool served);
  // Read what has arrived, on this thread.
  void read_what_has_arrived();

  // Within a slot of a group messages arrive in the order in which they were sent. Throws where the
  // connection is broken.
  // Sent at leisure, it goes in one packet with what is sent next, at the latest when TCP's timer fires: after
  // 200 ms, or what a way there and back takes.
  void send(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes, bool at_leisure);
  void hurry();
  void receive(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes);
  // The same, of a slot in which the peer sends without being asked, once it is told that here it may: with
  // `tells`, once all is there that it may fill.
  void expect(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes, bool tells);
  // Sends `text` behind all that was sent before. `is_last`: this rank has left the group, and messages that
  // arrive for the group are dropped.
  void tell(uint64_t group, const std::string& text, bool is_last);
  // Send it, behind all else that was sent. Throws where the connection is broken.
  void post(uint64_t group, Parcel parcel);
  using gloo::transport::tcp::Pair::send;

  // Before `buffer` is destroyed. Messages of which a part was sent are completed, others are not sent; data that
  // arrives for it is dropped.
  void forget(const Receiver& buffer, uint64_t group);

  // When the connection ended; kNever: it has not. And why, as Gloo says it.
  Clock::time_point ended_at() const { return ended_at_; }
  std::string problem();
  // Whether the kernel has all that was sent; also where the connection has ended.
  bool has_written();
  // Whether the peer's kernel has all that was sent, or has said nothing for as long as `silence`. The peer
  // gets what it has, also where this end closes now.
  bool has_delivered(std::chrono::milliseconds silence);

 private:
  using Buffer = gloo::transport::tcp::UnboundBuffer;
  using Weak = gloo::WeakNonOwningPtr<Buffer>;
  using Alive = gloo::NonOwningPtr<Buffer>;
  struct Part {
    Weak buffer;
    size_t offset, bytes;
  };
  struct Line {
    std::list<Part> sends, receives;  // that wait
    int ready = 0;                    // receives of the other end that wait
    bool is_open = false;             // it takes all that comes
  };
  struct Talk {
    std::unordered_map<uint64_t, Line> lines;  // by slot
    bool is_over_here = false, is_over_there = false;
  };
  using Lines = std::unordered_map<uint64_t, Line>;
  class Kept;

  void handleEvents(int events) override;
  bool read() override;
  bool write(gloo::transport::tcp::Op& op) override;
  void changeState(state next) noexcept override;

  void require_connected();
  static bool is_of(const Weak& weak, const Receiver& buffer);
  void let_go(const Receiver& buffer, uint64_t group);
  void put(size_t code, uint64_t group, uint64_t slot, const Part& part);
  void fail(const char* doing, int error);
  iovec next_room(Alive& buffer);
  ssize_t fill(const iovec& room);
  void find_place();
  void take_message(const Alive& buffer);
  void signal_all() noexcept;
  static void tidy(Lines& lines, uint64_t slot);

  const Told told_;
  Parcels& parcels_;
  std::atomic<Clock::time_point> ended_at_{kNever};
  // Under its mutex, like all else.
  std::unordered_map<uint64_t, Talk> talks_;  // by group
  std::list<Kept> kept_;                      // what goes out and is nobody else's
  bool is_placed_ = false;                    // what arrives just now has its buffer, if it has one
  std::string note_;
  std::optional<Parcel> parcel_;
  std::unique_ptr<char[]> waste_;  // for what nobody has a buffer for any more
  // What was read beyond its room; and whether the kernel has no more.
  std::unique_ptr<char[]> beyond_;
  size_t beyond_begin_ = 0, beyond_end_ = 0;
  bool is_drained_ = false;
  bool is_at_leisure_ = false;  // what is written just now
};

// A group as connections know it.
class Route {
 public:
  explicit Route(uint64_t group) : group(group) {}
  virtual ~Route() = default;

  // That with a rank of the group; it is made where there is none. Throws Failure.
  virtual Pair& pair_with(int peer) = 0;

  const uint64_t group;  // a number that no other has: that of a group that is no part of another is 0
};

// What all buffers of a group are: `context` has its connections.
class Receiver : public gloo::transport::tcp::UnboundBuffer {
 public:
  // Who wants to know what has moved, before it is seen here; who lives as long as `data` is used.
  class Mover {
   public:
    // So many bytes were sent, or received; with the pair locked.
    virtual void moved(int peer, size_t bytes) = 0;

   protected:
    ~Mover() = default;
  };

  Receiver(std::shared_ptr<Context> context, Route& route, void* data, size_t bytes, Mover* mover = nullptr);
  ~Receiver() override;

  void send(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void send(int peer, uint64_t slot, size_t offset, size_t bytes, bool at_leisure);
  void recv(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  using UnboundBuffer::recv;

  // How many waits for what it receives, or sends, would return at once.
  uint32_t received() { return now(recvCompletions_); }
  uint32_t sent() { return now(sendCompletions_); }

 private:
  friend class Pair;
  // One part is to be sent or received.
  void begin(Pair& pair);
  uint32_t now(int& count) {
    const std::lock_guard<std::mutex> lock(m_);
    return count;
  }

  Route& route_;
  Mover* const mover_;
  const uint64_t group_ = route_.group;
  std::vector<Pair*> pairs_;        // that have sent or received parts of it
  std::atomic<int> unfinished_{0};  // parts that they may still use
};

}  // namespace fl
