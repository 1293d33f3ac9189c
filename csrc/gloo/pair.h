// A connection with one rank. Gloo's base class has the socket and the send queue, and Gloo's thread serves
// them. The protocol differs from Gloo's: a receiver announces that it is ready, and then the sender sends.
// In Gloo, a sender also announces each send, which only a receive from an arbitrary rank needs. Gloo also
// searches all slots for every message. Here, messages of an ended group do not block other groups.
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

// Gloo's internal headers are included only here. A Context has a group's connections, a Device has the
// thread that serves sockets, and a Handler receives their events.
using Context = gloo::transport::tcp::Context;
using Device = gloo::transport::tcp::Device;
using Handler = gloo::transport::tcp::Handler;

std::shared_ptr<Device> create_device(const std::string& host, const std::string& interface);
// Return the device's epoll descriptor. Forked children close it, because it keeps connections open.
int descriptor_of(const Device& device);
// Return a socket that listens at the device's address. Throws std::system_error.
int listening_socket(const Device& device);
// Return the address of `socket` in Gloo's format.
std::vector<char> address_of(int socket);
sockaddr_storage read_address(const char* address, size_t bytes);

class Receiver;

// Bytes that are sent as one message. The constructor does not initialise them.
struct Parcel {
  explicit Parcel(size_t bytes) : memory(new char[bytes]), bytes(bytes) {}

  std::unique_ptr<char[]> memory;
  size_t bytes;
};

struct ArrivedCall { uint64_t tag; Parcel parcel; };

// Receives events about parcels. The thread that calls these functions has locked a pair. So a function must
// not wait for a lock if the owner of the lock may wait for a pair.
class Parcels {
 public:
  virtual ~Parcels() = default;

  // A parcel of `peer` has arrived. `is_over` is true if this rank has left the group.
  virtual void received(int peer, uint64_t group, bool is_over, Parcel parcel) = 0;
  // The kernel has accepted `bytes` bytes.
  virtual void sent(int peer, size_t bytes) = 0;
  virtual void ended(int peer) noexcept = 0;
};

class Pair : public gloo::transport::tcp::Pair {
 public:
  // Called with a note `text` of rank `peer` about a group that this rank has not left, on the thread that
  // has read the note. That thread holds the lock of the pair.
  using NoteHandler = std::function<void(int peer, uint64_t group, const std::string& text)>;

  // Use the connected `socket`. Throws if the peer has closed it; the caller must then close `socket`. `alarm`
  // lets Gloo's thread call settle() soon.
  Pair(Context* context, Device* device, int peer, int socket, NoteHandler note_handler, Parcels& parcels,
       std::function<void()> alarm);
  ~Pair() override;

  // Set whether Gloo's thread reads arriving data. settle() sets it after a time without set_served(false).
  void set_served(bool served);
  static inline std::atomic<int> sleepers{0};  // number of threads that sleep until Gloo's thread reads data
  // On Gloo's thread, after an alarm. Return true if it must be called again.
  bool settle();
  void read_available();
  int socket();

  // Send a message. Messages of one slot of a group arrive in order. Throws if the connection has ended.
  void send(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes);
  void receive(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes);
  // When a packet is sent: with the next packet, with several such packets, or after an alarm (kLater); also if
  // this rank waits, or after kGap since the last packet (kSoon); or at once (kNow).
  enum Haste { kLater, kSoon, kNow };
  // Send a packet, which needs no permission. Throws if the connection has ended.
  void call(uint64_t group, uint64_t tag, std::initializer_list<iovec> parts, Haste haste);
  // Send the packets that call() has delayed, if one of them has at least this `haste`. Return true if the
  // kernel has all data, or the connection has ended.
  bool hurry(Haste haste = kLater);
  // Count each packet of call() that arrives for `group` as a message that `buffer` has received.
  void listen(Receiver& buffer, uint64_t group);
  // Store the packets that have arrived for `group` in `calls`, and set the count of the listener to 0.
  void take_calls(uint64_t group, std::vector<ArrivedCall>& calls);
  // Send `text` after all earlier data. If `is_last`, leave the group and drop this rank's waiting messages.
  void send_note(uint64_t group, const std::string& text, bool is_last);
  // Send a parcel after all earlier data. Throws if the connection is broken.
  void post(uint64_t group, Parcel parcel);
  using gloo::transport::tcp::Pair::send;

  // Stop using `buffer`, which will be destroyed. Partly sent messages are completed. Other messages, and
  // data that arrives for the buffer, are dropped.
  void forget(const Receiver& buffer, uint64_t group);

  // Return the time when the connection ended, or kNever. problem() returns the text of the error.
  Clock::time_point ended_at() const { return ended_at_; }
  std::string problem();
  // True if the peer's kernel has acknowledged all data or has been silent for `silence`, or if the
  // connection has ended. Then it is useless to wait any longer before the connection is closed.
  bool has_delivered(std::chrono::milliseconds silence);

 private:
  using Buffer = gloo::transport::tcp::UnboundBuffer;
  using Weak = gloo::WeakNonOwningPtr<Buffer>;
  using Alive = gloo::NonOwningPtr<Buffer>;
  struct Part {
    Weak buffer;
    size_t offset, bytes;
  };
  struct SlotQueues {
    std::list<Part> sends, receives;  // waiting
    int ready = 0;                    // number of receives that the peer announced
  };
  struct GroupState {
    std::vector<ArrivedCall> calls;
    Weak listener;
    std::unordered_map<uint64_t, SlotQueues> slots;  // key: slot
    bool is_over_here = false, is_over_there = false;
  };
  using Queues = std::unordered_map<uint64_t, SlotQueues>;
  class OwnedBuffer;

  void handleEvents(int events) override;
  bool read() override;
  bool write(gloo::transport::tcp::Op& op) override;
  void changeState(state next) noexcept override;

  void require_connected();
  static void count(const Weak& weak, int peer);
  void put(size_t code, uint64_t group, uint64_t slot, const Part& part);
  bool send_held();
  void serve(bool served);
  void fail(const char* doing, int error);
  iovec next_room(Alive& buffer);
  ssize_t fill(const iovec& room);
  void match_buffer();
  void take_message(const Alive& buffer);
  void signal_all() noexcept;
  static void erase_if_idle(Queues& slots, uint64_t slot);

  const NoteHandler note_handler_;
  Parcels& parcels_;
  const std::function<void()> alarm_;
  std::atomic<Clock::time_point> ended_at_{kNever};
  // The pair's mutex guards the members below.
  std::unordered_map<uint64_t, GroupState> group_states_;  // key: group number
  std::list<OwnedBuffer> owned_;
  bool is_matched_ = false;  // match_buffer() was called for this message
  std::optional<Parcel> parcel_;
  std::unique_ptr<char[]> discarded_;  // for data that no buffer expects
  // beyond_: bytes that fill() has read in advance. is_drained_: the kernel had no more bytes.
  std::unique_ptr<char[]> beyond_;
  size_t beyond_begin_ = 0, beyond_end_ = 0;
  bool is_drained_ = false;
  std::string held_;  // delayed packets; the bytes in tx_ follow them
  Haste held_haste_ = kLater;
  Clock::time_point called_at_{};  // when call() last sent a packet
  bool is_served_ = true, was_polled_ = false;  // was_polled_: since the last settle()
};

// Gives the buffers of one group access to its connections.
class Route {
 public:
  explicit Route(uint64_t group) : group(group) {}
  virtual ~Route() = default;

  // Return the connection with rank `peer` of the group. Connect first if necessary. Throws Failure.
  virtual Pair& pair_with(int peer) = 0;

  const uint64_t group;  // number of the subgroup, or 0
};

// A buffer from which a group sends, or into which it receives. `context` has the connections.
class Receiver : public gloo::transport::tcp::UnboundBuffer {
 public:
  // Called after each transfer, before the buffer counts the transfer. It must outlive the buffer.
  class Mover {
   public:
    // Called with the pair locked after `bytes` bytes were sent or received.
    virtual void moved(int peer, size_t bytes) = 0;

   protected:
    ~Mover() = default;
  };

  Receiver(std::shared_ptr<Context> context, Route& route, void* data, size_t bytes, Mover* mover = nullptr);
  ~Receiver() override;

  void send(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  void recv(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  using UnboundBuffer::recv;

  // Number of finished receives, or sends, for which no thread has waited yet.
  uint32_t received() { return now(recvCompletions_); }
  uint32_t sent() { return now(sendCompletions_); }

 private:
  friend class Pair;
  // Count a message that `pair` will send or receive.
  void begin(Pair& pair);
  void forget_received() {
    const std::lock_guard<std::mutex> lock(m_);
    recvCompletions_ = 0;
  }
  uint32_t now(int& count) {
    const std::lock_guard<std::mutex> lock(m_);
    return count;
  }

  Route& route_;
  Mover* const mover_;
  const uint64_t group_ = route_.group;
  std::vector<Pair*> pairs_;        // connections that have used this buffer
  std::atomic<int> unfinished_{0};  // number of messages in progress
};

}  // namespace fl
