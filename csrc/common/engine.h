// The progress engine of a family of groups: messages from one rank to another, matched by source and
// tag in the order in which they were posted, as in MPI.
//
// An open message is an entry, a Message: 192 bytes, in a table by (source, tag). Entries are advanced by
// whoever waits for one, by the next call, and where nobody does by one thread that sleeps until something
// comes. A transport carries records between ranks (Wire); all else is here, once.
//
//   sender                                  receiver
//   kMessage: tag, call, data         ->    copied to where the receive wants it, or kept until there is one
//   kOffer: tag, call, address        ->    matched: reads the data out of the sender's memory -> kTaken
//                                           or, where that cannot be, asks for it             -> kAccepted
//   kData, kData, ...                 ->
//                                     <-    kRefused: the receiver calls something else; nothing has moved
//
// A send of little data ends when that was copied out, as long as what the receiver has not taken stays
// below its credit; a receiver that calls something else raises, and the sender's next call of the group
// does (FLASHLIGHT_CHECKS=sync: a send waits until it was received). All others end when they are taken.
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

constexpr size_t kTinyMessage = 32;  // bytes that travel in the line which announces them

// What goes from rank to rank. The receiver of a tiny message that it expects reads the first line alone.
struct Record {
  Record() = default;
  Record(const Record& other) { std::memcpy(static_cast<void*>(this), &other, sizeof other); }

  std::atomic<uint32_t> number;  // the transport's
  Kind kind;
  uint8_t way;
  uint16_t site;    // where the sender has called, as a kSite of it says
  int32_t tag;
  uint32_t bytes;   // of the data that comes with it
  uint32_t token;   // of the Message that is meant, at whoever has made that; 0: none
  uint32_t group;   // the transport's
  uint64_t digest;  // of what the sender calls
  union {
    char tiny[kTinyMessage];  // the data, if it is not more
    struct {
      uint32_t at;      // the transport's: where it lies
      uint32_t theirs;  // kAccepted: the token of who accepts
    };
  };
  // Read where the digests differ, or where there is more than comes with it.
  fl_signature call;
  uint64_t address;  // of all the data in the sender's process; 0: do not read there
};
static_assert(sizeof(Record) == 192, "three cache lines");

// What carries records; called under the engine's lock, but for the waits. Ranks are those of the engine.
class Wire {
 public:
  struct Room {
    Record* record = nullptr;  // null: there is none
    char* data = nullptr;      // for more than fits into the record
    uint64_t group = 0;        // whose it is
  };
  // Of what comes for a group that this rank has left.
  static constexpr uint64_t kLeft = ~uint64_t{0};
  virtual ~Wire() = default;

  // The most that comes with a message, in bytes.
  virtual size_t eager_bytes() const = 0;
  // Room for a record to `peer` with so many bytes, to be filled in and sent; none: not now.
  virtual Room reserve(int peer, size_t bytes) = 0;
  virtual void send(int peer, const Room& room) = 0;
  // Whether all that was sent gets there, also where this rank leaves now.
  virtual bool has_sent(int) { return true; }
  // The next record of `peer`, which stays until it is dropped.
  virtual Room next(int peer) = 0;
  virtual void drop(int peer) = 0;
  // Records that come for that group from now on are for one that was left.
  virtual void forget(uint64_t /* group */) {}

  // Data that moves from memory to memory in pieces, of which the wire has some on their way. Each one that has
  // moved comes as a kData of that peer, with `token`, which has its bytes as its digest: then it may go on.
  class Flow {
   public:
    virtual ~Flow() = default;  // what is on its way touches the memory no more
    virtual void go_on() = 0;
  };
  struct Moves {
    char* data;
    size_t bytes;
    int peer;
    uint64_t group;
    uint32_t token;
    uint32_t receiver;  // its token
    bool out;
  };
  // Null: it is sent with records, of which each should have `most_bytes` at most, one of the ways of `choice`.
  virtual std::unique_ptr<Flow> flow(const Moves&) { return nullptr; }
  virtual size_t most_bytes() const { return 0; }
  virtual Choice* choice(int) { return nullptr; }  // null: that is never so

  // Whether the memory of `peer` can be read, and reading it, without the lock; returns how many bytes were.
  virtual bool can_read(int) { return false; }
  virtual size_t read(int, uint64_t, void*, size_t) { return 0; }

  // A thread looks again and again for what comes from `peer`, kNobody: from any; until then.
  virtual void begin_looking(int) {}
  virtual void end_looking(int, bool /* in_vain */) {}
  // Sleep, as one who called or as the engine's thread, until something may have come that was not there
  // when begin_wait() returned.
  virtual uint32_t begin_wait() = 0;
  virtual void wait(uint32_t since, bool as_caller, long milliseconds) = 0;
  virtual void end_wait() = 0;
  virtual void wake(bool callers) = 0;
};

class Engine;
class Message;
class Port;

constexpr int kNobody = -1;

// By which a receive finds what was sent: whose it is, or kNobody for any, and its tag.
inline uint64_t key_of(int peer, int32_t tag) {
  return static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 32 | static_cast<uint32_t>(tag);
}

// The output of a receive may be its match.
inline fl_message message_by(const Request& call, const fl_site& site) {
  fl_match* const match = call.signature.verb == FL_RECV ? static_cast<fl_match*>(call.output) : nullptr;
  return {call.signature, call.data, call.peer, site, match};
}

// One send or receive that is open, or a handle of one that has ended.
class Message final : public fl_op {
 public:
  Message(Port& port, const fl_message& given, double seconds, uint16_t site);
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

  Message* next = nullptr;  // in its table or queue

 private:
  friend class Engine;
  friend class Port;
  // Of data that does not come with its offer.
  struct Movement {
    Movement(const Record& offer, int from) : offer(offer), from(from) {}

    const Record offer;
    const int from;       // in the engine
    size_t done = 0;      // bytes
    uint32_t token = 0;   // of this message, where others have to name it
    Choice::Trial trial;  // of the receiver
    bool is_busy = false; // a thread reads, without the lock
    std::unique_ptr<Wire::Flow> flow;
  };
  enum State : uint8_t { kNew, kWaitsForRoom, kOffered, kFlowsOut, kPosted, kReads, kFlowsIn, kOver };
  enum Flag : uint8_t { kAny = 1, kAwaited = 2, kAnnounced = 4, kHasOutcome = 8, kTimed = 16 };

  bool sends() const { return mine_.verb == FL_SEND; }
  size_t bytes() const { return static_cast<size_t>(mine_.count) * mine_.itemsize; }
  bool is_moving() const { return state_ == kFlowsOut || state_ == kReads || state_ == kFlowsIn; }
  bool is_well() const { return status() == FL_OK && (flags_ & kHasOutcome) == 0; }
  int hot() const;

  std::atomic<uint8_t> refs_{1};
  std::atomic<uint8_t> status_{FL_PENDING};
  State state_ = kNew;
  uint8_t flags_ = 0;
  uint32_t running_ = 0;       // what stands at stamp_ while it runs, its low bits
  int64_t* stamp_ = nullptr;
  Port* port_;
  union {
    fl_match* match_;    // of a receive until it is matched
    uint32_t token_;     // of an offer
    Movement* movement_;
    Outcome* outcome_;   // kHasOutcome
  };
  char* data_;
  fl_signature mine_;  // its sequence: the place among the receives of the group until it is matched
  int32_t peer_;       // in the group
  uint16_t site_;
  union {
    struct {
      float seconds_;
      uint32_t since_;  // milliseconds: when nothing more went on
    };
    double ended_;
  };
};
static_assert(sizeof(Message) <= 200, "there may be many of them");

// What somebody waits for; where there is none, it has not ended. Null: it has ended.
struct Awaited {
  Message* const* messages = nullptr;
  size_t count = 0;

  bool has_ended() const {
    const auto is_open = [](const Message* message) { return message != nullptr && message->is_open(); };
    return count > 0 && std::none_of(messages, messages + count, is_open);
  }
};

// The messages of one group.
class Port {
 public:
  // `ranks`: those of the group, as the engine knows them; `transport` knows what has become of them.
  Port(Engine& engine, uint64_t group, int rank, std::vector<int> ranks, Transport& transport);
  ~Port();
  Port(const Port&) = delete;
  // End what is open, with FL_CLOSED.
  void close();

  // On the caller's thread, to its end. Null: it has ended well, and there is nothing to fetch.
  Handle run(const fl_message& given, double seconds, InterruptCheck interrupt);
  Handle start(const fl_message& given, double seconds);
  std::vector<Handle> exchange(const fl_message* messages, int count, double seconds, InterruptCheck interrupt);
  std::vector<Handle> start_exchange(const fl_message* messages, int count, double seconds);
  // exchange() in two steps: post() never sleeps; it is empty where all have ended well within so many
  // looks in a row without any progress, none if `spins` is negative.
  using Posted = std::vector<Message*>;
  Posted post(const fl_message* messages, int count, double seconds, int spins);
  std::vector<Handle> finish(const Posted& posted, InterruptCheck interrupt, Clock::time_point until = kNever);

  // What an earlier send of this rank met after it had returned, once; null: nothing.
  Handle refused();
  bool has_refusal() const { return has_refusal_.load(std::memory_order_relaxed); }

 private:
  friend class Engine;
  friend class Message;
  // A message that nobody has received yet.
  struct Arrival {
    Arrival* next;
    Record record;  // its number: who sends
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
  Message* begin(const fl_message& given, double seconds, bool is_awaited, const std::optional<Seen>& refusal);
  Posted begin_all(const fl_message* messages, int count, double seconds, bool is_awaited);
  std::optional<Seen> take_refusal();
  static Message* unless_well(Message* message);

  Engine& engine_;
  const uint64_t group_;
  const int rank_;
  const std::vector<int> ranks_;  // in the engine
  std::vector<int> numbers_;      // by rank of the engine: in the group; -1: not in it
  Transport& transport_;
  // Guarded by the engine's lock.
  bool is_closed_ = false;
  int busy_ = 0;             // threads that use it without the lock
  size_t open_ = 0;          // messages that have not ended
  int failing_ = 0;          // threads that are about to end all of them
  uint64_t posted_count_ = 0;
  uint32_t searches_ = 0;
  std::vector<uint32_t> sent_;                // by rank: messages so far
  std::vector<uint32_t> answered_at_;         // by rank: when an offer was last, in milliseconds
  Table<Message> posted_;                     // receives that wait
  Table<Arrival> arrivals_;                   // messages that nobody has received yet
  std::vector<int> arrived_;                  // by rank: how many of them
  std::vector<std::vector<int32_t>> wanted_;  // by rank: tags that it has long waited for
  std::deque<Seen> refusals_;
  std::atomic<bool> has_refusal_{false};
};

class Engine {
 public:
  Engine(Wire& wire, int size);
  ~Engine();
  Engine(const Engine&) = delete;
  // From the beginning: have every send wait until it was received, or refused.
  void check_at_once() { checks_at_once_ = true; }
  bool checks_at_once() const { return checks_at_once_; }
  // The thread has ended on return.
  void stop();
  // The group is over, also for the wire: nothing comes for it any more.
  void forget(uint64_t group);

 private:
  friend class Port;
  friend class Message;
  // A record that is not about the data of a message, and waits for room.
  struct Control {
    Kind kind;
    uint64_t group = 0;
    int32_t tag = 0;
    uint32_t token = 0;
    uint32_t theirs = 0;
    uint64_t amount = 0;  // kCredit: in bytes
    uint16_t site = 0;
    uint8_t way = 0;
    fl_signature call{};
    std::string data{};
  };

  struct Peer {
    std::list<Control> controls;      // that wait for room; most peers never have one
    Message* waiting = nullptr;       // sends that do, oldest first
    Message* last_waiting = nullptr;
    size_t charged = 0;               // bytes of ours that it may still keep
    size_t owed = 0;                  // bytes of its that we do not keep any more, and have not said so
    std::vector<bool> told;           // sites of ours that it knows, by number
    std::unordered_map<uint16_t, fl_site> sites;
  };

  struct Verdict {
    Port* port;
    Message* message;
    Message::State state;  // when it was found
    Failure failure;
  };
  using Lock = std::unique_lock<std::mutex>;

  // All of these under the lock.
  uint16_t number_of(const fl_site& site);
  bool send_now(Port& port, const fl_message& given);
  void begin(Message& message, fl_status status = FL_OK, std::unique_ptr<Outcome> outcome = nullptr);
  static void queue(Peer& peer, Message& message);
  enum class Sent { kNot, kGone, kOffered };
  Sent put(Port& port, const fl_signature& call, int peer, const void* data, uint16_t site, Message* message);
  bool tell_site(int to, uint16_t site);
  void control(int to, Control control);
  bool put_control(int to, const Control& control);
  bool flush(int to);
  bool flow_out(Message& message);
  bool progress(Lock& lock, int hot);
  bool read_records(int from);
  void handle(int from, const Wire::Room& room);
  void arrive(int from, const Wire::Room& room);
  void arrive(Port& port, int from, const Record& record, const char* data);
  void give_back(int from, Port::Arrival& arrival);
  Message* first_for(Port& port, int peer, int32_t tag);
  static bool claim(const Message& message);
  void credit(int from, size_t bytes);
  void deliver(Message& message, int from, const Record& record, const char* data);
  void refuse(Message& message, int from, const Record& record);
  void end_compared(Message& message, fl_status status, int from, const fl_signature& theirs, uint16_t site);
  void take_rest(Message& message);
  void read_on(Message& message, Lock& lock);
  void receive_data(const Record& record, const char* data);
  void answered(int from, const Record& record);
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
  std::string what_keeps(const Message& message) const;

  // Without it.
  void cancel(Message& message);
  void send_answers(Port& port);
  bool burn(const Awaited& awaited, Patience patience, int hot);
  void wait(Port& port, const Awaited& awaited, int hot, Clock::time_point until, InterruptCheck interrupt);
  bool sleep(bool as_caller, long milliseconds, const Awaited& awaited);
  void look_around();
  void fail(Port& port, const Failure& failure, const Message* about);
  void tick();
  uint32_t now() const { return static_cast<uint32_t>((coarse_now() - began_) / 1000000); }

  Wire& wire_;
  const int size_;
  bool checks_at_once_;
  const int64_t began_ = coarse_now();
  std::mutex mutex_;
  std::condition_variable idle_;  // a port is used by nobody without the lock
  std::unordered_map<uint64_t, Port*> ports_;
  // What has come for groups that this rank is about to make.
  std::unordered_map<uint64_t, std::vector<Port::Arrival*>> early_;
  std::vector<Peer> peers_;
  std::vector<Message*> moving_;
  std::vector<std::pair<uint32_t, Message*>> tokens_;  // with how often each was used
  std::vector<uint32_t> free_tokens_;
  std::vector<fl_site> sites_;
  std::unordered_map<std::string, uint16_t> site_numbers_;
  std::pair<const fl_site*, uint16_t> last_sites_[16] = {};
  // These counts are guarded by the lock, or looked at again with the next tick.
  std::atomic<size_t> open_{0};       // messages that have not ended, and answers that wait for room
  std::atomic<int> callers_{0};       // threads that wait
  std::atomic<uint32_t> calls_{0};    // so far
  uint32_t calls_seen_ = 0;           // by the last tick
  uint32_t passes_ = 0;
  std::atomic<bool> stopping_{false};
  Ticker ticker_{[this] { tick(); }};
};

}  // namespace fl
