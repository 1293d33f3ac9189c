// Progress engine of a group and its subgroups: messages between ranks, matched by source and tag as in MPI.
//
// An open message is a Message of 192 bytes in a table by (source, tag). A waiting caller or the next call
// advances the open messages. If no thread calls, one background thread advances them and sleeps until data
// arrives. A Wire transports records between ranks.
//
//     sender                                  receiver
//     kMessage: tag, call, data         ->    copied into the receive's array, or kept for a later receive
//     kOffer: tag, call, address        ->    matched: reads the data from the sender's memory  -> kTaken
//                                             or, if it cannot read there, requests the data    -> kAccepted
//     kData, kData, ...                 ->
//                                       <-    kRefused: the receiver posted a different call; no data moves
//
// If a small message is within the sender's credit, its send ends after the copy. If the calls then differ,
// the receive raises, and so does the sender's next call of the group. With FLASHLIGHT_CHECKS=sync such a
// send ends only when the message is received. Other sends end when the receiver has taken the data.
#pragma once

#include <cstring>
#include <deque>
#include <list>
#include <new>
#include <unordered_map>

#include "choice.h"
#include "operation.h"
#include "patience.h"
#include "signature.h"
#include "table.h"
#include "ticker.h"

namespace fl {

enum Kind : uint8_t { kMessage, kOffer, kTaken, kAccepted, kData, kRefused, kLateRefusal, kCredit, kSite, kWanted };

constexpr size_t kTinyMessage = 32;  // bytes of data that fit into the first cache line of a record

// A message between ranks. The receiver reads only the first of three cache lines if the data has at most
// kTinyMessage bytes and the sender's digest equals the digest of the receiver's signature.
struct Record {
  Record() = default;
  Record(const Record& other) { std::memcpy(static_cast<void*>(this), &other, sizeof other); }

  std::atomic<uint32_t> number;  // used by the transport
  Kind kind;
  uint8_t path;
  uint16_t site;  // number of the sender's call site, defined by a kSite record
  int32_t tag;
  uint32_t bytes;   // size of the data sent with this record
  uint32_t token;  // number of the Message concerned, assigned by the rank that owns it; 0: none
  uint32_t group;   // used by the transport
  uint64_t digest;  // digest of the sender's signature
  union {
    char tiny[kTinyMessage];  // the data, if it fits
    struct {
      uint32_t at;              // used by the transport: location of the data
      uint32_t receiver_token;  // kAccepted: token of the receiver's message
    };
  };
  // The receiver reads `call` if the digests differ, or if the record does not contain all data.
  fl_signature call;
  uint64_t address;  // address of the data in the sender's process; 0: not readable
};
static_assert(sizeof(Record) == 192, "three cache lines");

// Transport of records. All functions take engine ranks. Except for waits and read(), the caller holds the
// lock.
class Wire {
 public:
  struct Room {
    Record* record = nullptr;  // null: no record
    char* data = nullptr;      // memory for data that does not fit into the record
    uint64_t group = 0;        // group of the record
  };
  // Group number that next() returns in records for a group that this rank has left.
  static constexpr uint64_t kLeft = ~uint64_t{0};
  virtual ~Wire() = default;

  // Maximum number of data bytes in one record.
  virtual size_t eager_bytes() const = 0;
  // Reserve a record to `peer` with `bytes` data bytes. The caller fills and sends it. Null: no space now.
  virtual Room reserve(int peer, size_t bytes) = 0;
  virtual void send(int peer, const Room& room) = 0;
  // True if all sent records will arrive even if this rank leaves now.
  virtual bool has_sent(int) { return true; }
  // Return the next record from `peer`, which stays valid until drop(). Null record: there is none.
  virtual Room next(int peer) = 0;
  virtual void drop(int peer) = 0;
  // From now on, treat records for `group` as records for a group that this rank has left.
  virtual void forget(uint64_t /* group */) {}

  // A transfer between two ranks' memory, several chunks at a time. After each chunk, Wire::next() returns a
  // kData record with Moves::token and, as digest, the chunk's bytes. The engine then calls go_on().
  class Flow {
   public:
    virtual ~Flow() = default;  // afterwards this transfer accesses no memory
    virtual void go_on() = 0;
  };
  struct Moves {
    char* data;
    size_t bytes;
    int peer;
    uint64_t group;
    uint32_t token;
    uint32_t receiver;  // token of the receiver's message
    bool out;
  };
  // Return a transfer. Null: data travels in records of up to most_bytes(), on a path that choice() selects.
  virtual std::unique_ptr<Flow> flow(const Moves&) { return nullptr; }
  virtual size_t most_bytes() const { return 0; }
  virtual Choice* choice(int) { return nullptr; }  // null if flow() returns transfers

  // can_read(): return whether this process can read the memory of a peer. read(): read such memory and
  // return the number of bytes read; the caller does not hold the lock.
  virtual bool can_read(int) { return false; }
  virtual size_t read(int, uint64_t, void*, size_t) { return 0; }

  // Called before and after a wait that polls for records from a peer (kNoPeer: from any rank).
  virtual void begin_polling(int) {}
  virtual void end_polling(int, bool /* in_vain */) {}
  // Let other threads run after poll number `polls` of a wait for records from a peer.
  virtual void rest(int /* peer */, int /* polls */) { yield_processor(); }
  // Sleep until a record may have arrived since begin_wait(). `as_caller`: false on the engine's thread.
  virtual uint32_t begin_wait() = 0;
  virtual void wait(uint32_t since, bool as_caller, long milliseconds) = 0;
  virtual void end_wait() = 0;
  virtual void wake(bool callers) = 0;
};

class Engine;
class Message;
class Port;

constexpr int kNoPeer = -1;

// Key of receives and messages, which match if keys are equal: source rank (kNoPeer: any) and tag.
inline uint64_t key_of(int peer, int32_t tag) {
  return static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 32 | static_cast<uint32_t>(tag);
}

// Return the message for a send or receive `call`. A receive may pass an fl_match as `output`.
inline fl_message message_by(const Request& call, const fl_site& site) {
  fl_match* const match = call.signature.verb == FL_RECV ? static_cast<fl_match*>(call.output) : nullptr;
  return {call.signature, call.data, call.peer, site, match};
}

// One open send or receive, or the handle of a finished send or receive.
class Message final : public fl_op {
 public:
  Message(Port& port, const fl_message& request, double seconds, uint16_t site);
  ~Message() override;
  Message(const Message&) = delete;

  void release() noexcept override;
  fl_status wait(double seconds) override;
  const Outcome& outcome() const override;
  double ended_at() const override;
  void stamp(int64_t* ended, int64_t running) override;
  void cancel() override;

  fl_status status() const { return static_cast<fl_status>(status_.load(std::memory_order_acquire)); }
  bool is_open() const { return status() == FL_PENDING; }
  uint64_t key() const;

  Message* next = nullptr;  // link in its table or queue

 private:
  friend class Engine;
  friend class Port;
  // Transfer of the data that the offer did not contain.
  struct Movement {
    Movement(const Record& offer, int from) : offer(offer), from(from) {}

    const Record offer;
    const int from;        // engine rank
    size_t done = 0;       // bytes transferred
    uint32_t token = 0;    // token by which peers address this message; 0: none
    Choice::Trial trial;   // receiver only
    bool is_busy = false;  // a thread reads without the lock
    std::unique_ptr<Wire::Flow> flow;
  };
  enum State : uint8_t { kNew, kWaitsForRoom, kOffered, kFlowsOut, kPosted, kReads, kFlowsIn, kOver };
  enum Flag : uint8_t { kAny = 1, kAwaited = 2, kAnnounced = 4, kHasOutcome = 8, kTimed = 16 };

  bool sends() const { return call_.verb == FL_SEND; }
  size_t bytes() const { return static_cast<size_t>(call_.count) * call_.itemsize; }
  bool is_moving() const { return state_ == kFlowsOut || state_ == kReads || state_ == kFlowsIn; }
  bool is_plain_success() const { return status() == FL_OK && (flags_ & kHasOutcome) == 0; }
  int hint() const;

  std::atomic<uint8_t> refs_{1};
  std::atomic<uint8_t> status_{FL_PENDING};
  State state_ = kNew;
  uint8_t flags_ = 0;
  uint32_t running_ = 0;  // low bits of *stamp_ while this message is open
  int64_t* stamp_ = nullptr;
  Port* port_;
  union {
    fl_match* match_;  // of a receive that has not matched: its fl_match, or null
    uint32_t token_;   // of an offered message: its token
    Movement* movement_;
    Outcome* outcome_;  // kHasOutcome
  };
  char* data_;
  fl_signature call_;  // `sequence` of a receive that has not matched: its posting order
  int32_t peer_;       // group rank
  uint16_t site_;
  union {
    struct {
      float seconds_;
      uint32_t since_;  // time of the last progress, in milliseconds
    };
    double ended_;
  };
};
static_assert(sizeof(Message) <= 200, "there may be many of them");

// Messages that a caller waits for. An entry is null if its message has ended. An empty list has not ended.
struct Awaited {
  Message* const* messages = nullptr;
  size_t count = 0;

  bool has_ended() const {
    const auto is_open = [](const Message* message) { return message != nullptr && message->is_open(); };
    return count > 0 && std::none_of(messages, messages + count, is_open);
  }
};

class Port {
 public:
  // `ranks`: engine ranks of the group's members. `transport`: reports failures of ranks.
  Port(Engine& engine, uint64_t group, int rank, std::vector<int> ranks, Transport& transport);
  ~Port();
  Port(const Port&) = delete;
  // End open messages with FL_CLOSED.
  void close();

  // Send or receive a message, and block until it has ended. Null: success without a result to fetch.
  Handle run(const fl_message& request, double seconds, InterruptCheck interrupt);
  Handle start(const fl_message& request, double seconds);
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds, InterruptCheck interrupt);
  std::vector<Handle> start_exchange(const fl_message* messages, int count, double seconds);
  // The two steps of exchange(). post() begins the messages. It then polls without sleep until `spins` polls
  // in a row made no progress (negative: no polls). It returns an empty list if all messages have succeeded.
  using Posted = std::vector<Message*>;
  Posted post(const fl_message* messages, int count, double seconds, int spins);
  std::vector<Handle> finish(const Posted& posted, InterruptCheck interrupt, Clock::time_point until = kNever);

  // Return the next mismatch of a send that had returned before its call was compared. Null: there is none.
  Handle refused();
  bool has_refusal() const { return has_refusal_.load(std::memory_order_relaxed); }

 private:
  friend class Engine;
  friend class Message;
  // An arrived message without a matching receive.
  struct Arrival {
    Arrival* next;
    Record record;  // a copy, in which `number` is the source rank
    char data[];

    static Arrival* make(int from, const Record& record, const char* data) {
      const size_t more = record.bytes > kTinyMessage ? record.bytes : 0;
      auto* arrival = static_cast<Arrival*>(::operator new(sizeof(Arrival) + more));
      std::memcpy(static_cast<void*>(&arrival->record), &record, sizeof record);
      arrival->record.number.store(static_cast<uint32_t>(from), std::memory_order_relaxed);
      if (more > 0) std::memcpy(arrival->data, data, more);
      return arrival;
    }
    static void free(Arrival* arrival) { ::operator delete(arrival); }
    int from() const { return static_cast<int>(record.number.load(std::memory_order_relaxed)); }
    uint64_t key() const { return key_of(from(), record.tag); }
  };

  std::optional<Failure> why_ended() const;
  Message* begin(const fl_message& request, double seconds, bool is_awaited,
                 const std::optional<CallReport>& refusal);
  Posted begin_all(const fl_message* messages, int count, double seconds, bool is_awaited);
  std::optional<CallReport> take_refusal();
  static Message* release_if_ok(Message* message);

  Engine& engine_;
  const uint64_t group_;
  const int rank_;
  const std::vector<int> ranks_;  // engine ranks
  std::vector<int> numbers_;      // group rank of each engine rank; -1: not a member
  Transport& transport_;
  // Guarded by the engine's lock.
  bool is_closed_ = false;
  int busy_ = 0;     // threads that use the port without the lock
  size_t open_ = 0;  // messages that have not ended
  int failing_ = 0;  // threads that are about to end all messages
  uint64_t posted_count_ = 0;
  uint32_t searches_ = 0;
  std::vector<uint32_t> sent_;                // by rank: number of messages sent to it
  std::vector<uint32_t> answered_at_;         // by rank: time of its last answer to an offer, in milliseconds
  Table<Message> posted_;                     // open receives
  Table<Arrival> arrivals_;                   // messages without a receive
  std::vector<int> arrived_;                  // by rank: number of its entries in arrivals_
  std::vector<std::vector<int32_t>> wanted_;  // by rank: tags of its receives that have waited for long
  std::deque<CallReport> refusals_;
  std::atomic<bool> has_refusal_{false};
};

class Engine {
 public:
  Engine(Wire& wire, int size);
  ~Engine();
  Engine(const Engine&) = delete;
  // Make every send wait until it is received or rejected. Call this before the first message.
  void check_at_once() { checks_at_once_ = true; }
  bool checks_at_once() const { return checks_at_once_; }
  void stop();
  // Drop records for `group`, which has ended; the wire discards later records.
  void forget(uint64_t group);

 private:
  friend class Port;
  friend class Message;
  // A record without message data that waits until there is space to send it.
  struct Control {
    Kind kind;
    uint64_t group = 0;
    int32_t tag = 0;
    uint32_t token = 0;
    uint32_t receiver_token = 0;
    uint64_t amount = 0;  // kCredit: bytes
    uint16_t site = 0;
    uint8_t path = 0;
    fl_signature call{};
    std::string data{};
  };

  struct Peer {
    std::list<Control> controls;  // records that wait for space; empty for most peers
    Message* waiting = nullptr;   // sends to this peer that wait for space, oldest first
    Message* last_waiting = nullptr;
    size_t charged = 0;  // bytes of this rank's messages that the peer may buffer
    size_t owed = 0;  // bytes of the peer's messages freed here since the last kCredit record
    std::vector<bool> sent_sites;  // by site number: whether the peer knows the text
    std::unordered_map<uint16_t, fl_site> sites;
  };

  struct Verdict {
    Port* port;
    Message* message;
    Message::State state;  // state when the failure was detected
    Failure failure;
  };
  using Lock = std::unique_lock<std::mutex>;

  // The following functions require the lock.
  uint16_t site_number(const fl_site& site);
  bool send_now(Port& port, const fl_message& request);
  void begin(Message& message, fl_status status = FL_OK, std::unique_ptr<Outcome> outcome = nullptr);
  static void queue(Peer& peer, Message& message);
  enum class Sent { kNot, kGone, kOffered };
  Sent put(Port& port, const fl_signature& call, int peer, const void* data, uint16_t site, Message* message);
  bool send_site(int to, uint16_t site);
  void control(int to, Control control);
  bool put_control(int to, const Control& control);
  bool flush(int to);
  bool flow_out(Message& message);
  bool progress(Lock& lock, int hint);
  bool read_records(int from);
  void handle(int from, const Wire::Room& room);
  void arrive(int from, const Wire::Room& room);
  void arrive(Port& port, int from, const Record& record, const char* data);
  void return_credit(int from, Port::Arrival& arrival);
  Message* take_receive(Port& port, int peer, int32_t tag);
  static bool claim(const Message& message);
  void credit(int from, size_t bytes);
  void deliver(Message& message, int from, const Record& record, const char* data);
  void refuse(Message& message, int from, const Record& record);
  void end_compared(Message& message, fl_status status, int from, const fl_signature& peer_call, uint16_t site);
  void receive_rest(Message& message);
  void read_chunk(Message& message, Lock& lock);
  void receive_data(const Record& record, const char* data);
  void handle_answer(int from, const Record& record);
  uint32_t token_for(Message& message);
  Message* by_token(uint32_t token);
  void free_token(uint32_t token);
  void drop_moving(Message& message);
  void end(Message& message, fl_status status, std::unique_ptr<Outcome> outcome = nullptr);
  template <typename Visit>
  void take_all(Port& port, Visit visit);
  template <typename Visit>
  void for_each(const Port& port, Visit visit) const;
  void end_all(Port& port, const Failure& why, const Failure* found, const Message* about);
  const fl_site& site_of(int from, uint16_t number) const;
  void find_failures(Port& port, std::vector<Verdict>& found);
  void announce(Message& message);
  static bool is_claimed(const Message& message);
  std::string describe_wait(const Message& message) const;

  // The following functions lock the mutex themselves.
  void cancel(Message& message);
  void send_answers(Port& port);
  bool poll(const Awaited& awaited, Patience patience, int hint);
  void wait(Port& port, const Awaited& awaited, int hint, Clock::time_point until, InterruptCheck interrupt);
  bool sleep(bool as_caller, long milliseconds, const Awaited& awaited);
  void check_waits();
  void fail(Port& port, const Failure& failure, const Message* about);
  void tick();
  uint32_t now() const { return static_cast<uint32_t>((coarse_now() - began_) / 1000000); }

  Wire& wire_;
  const int size_;
  bool checks_at_once_;
  const int64_t began_ = coarse_now();
  std::mutex mutex_;
  std::condition_variable idle_;  // notified when no thread uses a port without the lock
  std::unordered_map<uint64_t, Port*> ports_;
  // Records for groups that this rank has not created yet.
  std::unordered_map<uint64_t, std::vector<Port::Arrival*>> early_;
  std::vector<Peer> peers_;
  std::vector<Message*> moving_;
  std::vector<std::pair<uint32_t, Message*>> tokens_;  // number of uses of each token, and its message
  std::vector<uint32_t> free_tokens_;
  std::vector<fl_site> sites_;
  std::unordered_map<std::string, uint16_t> site_numbers_;
  std::pair<const fl_site*, uint16_t> last_sites_[16] = {};
  // Read without the lock: if a thread reads an old value, the next tick corrects the effect.
  std::atomic<size_t> open_{0};     // open messages and queued answers
  std::atomic<int> callers_{0};     // waiting threads
  std::atomic<uint32_t> calls_{0};  // calls so far
  uint32_t calls_seen_ = 0;         // value of calls_ at the last tick
  uint32_t passes_ = 0;
  std::atomic<bool> stopping_{false};
  Ticker ticker_{std::chrono::milliseconds(1), [this] { tick(); }};
};

}  // namespace fl
