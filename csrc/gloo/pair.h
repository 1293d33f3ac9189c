// Gloo owns the socket, its thread and the send queue. This class has its own protocol: a receiver announces
// that it is ready, then the sender sends. Gloo's protocol also announces each send, which only helps
// receives from any rank, and searches all slots for every message. In addition, messages of a group that has
// ended must not block other groups: see forget.
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

// Only this header includes Gloo's internal headers. Context holds a group's connections, Device owns the
// socket thread, and Handler receives socket events.
using Context = gloo::transport::tcp::Context;
using Device = gloo::transport::tcp::Device;
using Handler = gloo::transport::tcp::Handler;

std::shared_ptr<Device> create_device(const std::string& host, const std::string& interface);
// Return the device's epoll descriptor, for forked children to close: their copy would hide a rank's death.
int descriptor_of(const Device& device);
// Return a socket that listens at the device's address. Throws.
int listening_socket(const Device& device);
// Return the address of `socket` in Gloo's format.
std::vector<char> address_of(int socket);
sockaddr_storage read_address(const char* address, size_t bytes);

class Receiver;

// Bytes sent as one message. A buffer for more bytes is not initialised.
struct Parcel {
  explicit Parcel(size_t bytes) : memory(new char[bytes]), bytes(bytes) {}

  std::unique_ptr<char[]> memory;
  size_t bytes;
};

// Sender and receiver of parcels. Its functions are called with a pair locked. They must not wait for a lock
// if the holder of that lock may need a pair.
class Parcels {
 public:
  virtual ~Parcels() = default;

  // `is_over`: this rank has left the group.
  virtual void received(int peer, uint64_t group, bool is_over, Parcel parcel) = 0;
  // The kernel has accepted `bytes` bytes.
  virtual void sent(int peer, size_t bytes) = 0;
  // The connection has ended.
  virtual void ended(int peer) noexcept = 0;
};

class Pair : public gloo::transport::tcp::Pair {
 public:
  // Handler for a note `text` of rank `peer` about a group that has not ended here. Called on Gloo's thread
  // or a reading thread, with the pair locked.
  using NoteHandler = std::function<void(int peer, uint64_t group, const std::string& text)>;

  // `socket` is connected. Throws if the peer has closed it; then `socket` stays open.
  Pair(Context* context, Device* device, int peer, int socket, NoteHandler note_handler, Parcels& parcels);
  ~Pair() override;

  // Set whether Gloo's thread reads arriving data (initially true).
  void set_served(bool served);
  // Read arrived data on this thread.
  void read_available();

  // Send. Messages of one slot of a group keep their order. Throws if the connection is broken. `at_leisure`:
  // send in one packet with the next message, or when TCP's timer fires, after 200 ms or one round trip.
  void send(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes, bool at_leisure);
  void hurry();
  void receive(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes);
  // Receive in a slot whose peer, after one permission, sends without requests. `grants`: give the permission
  // now; all initial buffers must have been posted.
  void expect(Receiver& buffer, uint64_t group, uint64_t slot, size_t offset, size_t bytes, bool grants);
  // Send `text` after all earlier data. `is_last`: this rank leaves the group and drops its later messages.
  void send_note(uint64_t group, const std::string& text, bool is_last);
  // Send a parcel after all earlier data. Throws if the connection is broken.
  void post(uint64_t group, Parcel parcel);
  using gloo::transport::tcp::Pair::send;

  // Call it before `buffer` is destroyed. Messages that were partly sent are completed, and others are not
  // sent. Data that arrives later for the buffer is dropped.
  void forget(const Receiver& buffer, uint64_t group);

  // Return the time at which the connection ended, or kNever. problem() returns Gloo's text of the reason.
  Clock::time_point ended_at() const { return ended_at_; }
  std::string problem();
  // True if the kernel has accepted all data to send, or if the connection has ended.
  bool has_written();
  // True if the peer's kernel has acknowledged all data, or was silent for `silence`. If true, closing the
  // connection loses no data that could still arrive.
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
    int ready = 0;                    // number of waiting receives of the peer
    bool is_open = false;             // the peer accepts messages without requests
  };
  struct GroupState {
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
  static bool is_buffer(const Weak& weak, const Receiver& buffer);
  void drop_sends(const Receiver& buffer, uint64_t group);
  void put(size_t code, uint64_t group, uint64_t slot, const Part& part);
  void fail(const char* doing, int error);
  iovec next_room(Alive& buffer);
  ssize_t fill(const iovec& room);
  void match_buffer();
  void take_message(const Alive& buffer);
  void signal_all() noexcept;
  static void erase_if_idle(Queues& slots, uint64_t slot);

  const NoteHandler note_handler_;
  Parcels& parcels_;
  std::atomic<Clock::time_point> ended_at_{kNever};
  // Guarded by the pair's mutex.
  std::unordered_map<uint64_t, GroupState> group_states_;  // key: group number
  std::list<OwnedBuffer> owned_;  // outgoing data that the pair owns
  bool is_matched_ = false;  // the arriving message has been matched with a buffer
  std::string note_;
  std::optional<Parcel> parcel_;
  std::unique_ptr<char[]> discarded_;  // memory for arriving data that no buffer waits for
  // beyond_: bytes read beyond the current buffer. is_drained_: whether the kernel has no more bytes.
  std::unique_ptr<char[]> beyond_;
  size_t beyond_begin_ = 0, beyond_end_ = 0;
  bool is_drained_ = false;
  bool is_at_leisure_ = false;  // whether the message being written was sent with `at_leisure`
};

// A group's access to its connections.
class Route {
 public:
  explicit Route(uint64_t group) : group(group) {}
  virtual ~Route() = default;

  // Return the connection with rank `peer` of the group. Connect first if necessary. Throws Failure.
  virtual Pair& pair_with(int peer) = 0;

  const uint64_t group;  // unique number; 0 for a group that is not a subgroup
};

// Base of all buffers of a group; `context` owns the connections.
class Receiver : public gloo::transport::tcp::UnboundBuffer {
 public:
  // Observer of transfers, called before the buffer counts them. It must outlive the use of `data`.
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
  void send(int peer, uint64_t slot, size_t offset, size_t bytes, bool at_leisure);
  void recv(int peer, uint64_t slot, size_t offset, size_t bytes) override;
  using UnboundBuffer::recv;

  // received() and sent() return the number of finished receives and sends that no wait has consumed.
  uint32_t received() { return now(recvCompletions_); }
  uint32_t sent() { return now(sendCompletions_); }

 private:
  friend class Pair;
  // Count a part that `pair` will send or receive.
  void begin(Pair& pair);
  uint32_t now(int& count) {
    const std::lock_guard<std::mutex> lock(m_);
    return count;
  }

  Route& route_;
  Mover* const mover_;
  const uint64_t group_ = route_.group;
  std::vector<Pair*> pairs_;        // pairs that sent or received parts
  std::atomic<int> unfinished_{0};  // parts that pairs may still use
};

}  // namespace fl
