// The memory that the ranks of one host share, and its layout.
#pragma once

#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../common/abi.h"
#include "futex.h"
#include "choice.h"
#include "counter.h"

namespace fl {

// A mapped file in memory. Unmapped with the object, and closed.
class Mapping {
 public:
  // Create the file, exclusively and for this user alone, or take one without a name that a process
  // has open (/proc/PID/fd/N), and reserve its memory; throws std::system_error. A name stays until
  // unlink().
  static Mapping create(const std::string& path, size_t bytes);
  // Map a file that this user has created; throws std::system_error.
  static Mapping open(const std::string& path, size_t bytes);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  // The file stays open until this, to hold locks.
  void close_file();

  // Lock byte `number` of the file until it is closed, which the end of the process does too; false
  // where that cannot be had. And whether another mapping has locked it. Unlike a pidfd, that reaches
  // into other containers.
  bool lock(int number) const;
  bool is_locked(int number) const;

 private:
  Mapping(int fd, char* data, size_t size) : fd_(fd), data_(data), size_(size) {}
  int fd_ = -1;
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Of a clock that all processes of a host share, some milliseconds behind and quick to read.
inline int64_t coarse_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

constexpr size_t kLine = 64;
constexpr size_t kTinyBytes = 16;
constexpr size_t kInlineBytes = 16384;
constexpr uint32_t kSlots = 4;
constexpr uint32_t kCalls = 16;    // of a rank that the others can read
constexpr uint32_t kPayloads = 4;  // data of a rank's calls that the others can read

// How many calls a rank may be ahead of another, each of which can then read what the other calls while it
// makes one of those itself: see Collectives::find_room.
constexpr uint32_t kMostAhead = (kCalls - 1) / 2;

// What a rank announces when it calls. A tiny call is all in the first line: one
// cache line goes from core to core, of a pair, as processors fetch the other one too. The number is raised
// last.
struct alignas(2 * kLine) Call {
  Counter number;
  uint32_t kind;    // part_of, verb, dtype, op, and what collectives.cc says with it
  int32_t root;     // root, or 0
  int64_t count;    // elements
  double scale;
  uint64_t shape;   // a hash
  uint64_t place;   // region and offset of the data, where it lies in shared memory; else 0
  union {
    char tiny[kTinyBytes];
    uint32_t payload;  // which has the data, up to kInlineBytes
    struct {
      uint64_t address;  // of the data in this rank's process
      Costs costs;
    } large;  // more than kInlineBytes
  };
};
static_assert(offsetof(Call, tiny) + kTinyBytes == kLine, "a tiny call is one cache line");

// The same in words, which nobody reads while all is well.
struct alignas(kLine) Description {
  fl_signature signature;
  int64_t called_at;  // nanoseconds of coarse_now()
  Counter placed;     // the number of the call, after a mismatch in it: the site is known
  fl_site site;       // known from the beginning of a call that may return ahead
};

// Why a rank left or gave up.
struct alignas(kLine) Farewell {
  static constexpr int kMaxMissing = 32;
  Counter given;  // 0: still here
  int32_t status;
  int32_t missing_count;
  int32_t missing[kMaxMissing];
  char message[4000];
};

// A part of another rank's array that this rank is to read and cannot: see Collectives::ask_for.
struct alignas(kLine) Request {
  Counter asked;   // requests so far, of this rank
  Counter served;  // of these, raised by whoever it has asked
  int32_t owner;   // whom it asks
  uint64_t begin, bytes;  // of what that rank gave with this call
};

// What one rank writes and the others read. Counters go on from call to call: nothing is reset.
struct alignas(kLine) RankBlock {
  Call calls[kCalls];  // by number
  Description descriptions[kCalls];
  alignas(4096) char payloads[kPayloads][kInlineBytes];
  alignas(kLine) Counter filled;   // chunks that this rank has put into its slots
  alignas(kLine) Counter reduced;  // chunks of which it has reduced its part
  alignas(kLine) Counter drained;  // chunks of the others that it needs no more
  Request request;
  Farewell farewell;
  std::atomic<int64_t> left_at;  // since when, of coarse_now(), it begins no more messages; 0: it does
  alignas(kLine) Futex futex;  // for the threads of this rank that wait for messages
  alignas(kLine) std::atomic<int32_t> pid;  // written last; 0: not there yet
  std::atomic<uint64_t> pid_namespace;
  std::atomic<int32_t> holds_lock;  // of its byte of the file, while it lives
  uint64_t token, token_at;  // a number, and where it also lies in the process: see remote.h
};

constexpr uint32_t kMaxOffers = 64;  // messages to one rank that wait for a receive; see offers()
constexpr size_t kTinyMessage = 32;  // bytes that travel in the line which announces them
constexpr uint32_t kWanted = 16;     // receives that a sender can look up while they wait
constexpr uint32_t kPieces = 4;      // of a channel, which a long message goes through in turn

// What became of an offer.
enum Answer : int32_t {
  kTaken,     // it has been received
  kAccepted,  // what has not come with it may flow when it is its turn
  kRefused,   // the receiver calls something else
};

// A message that a rank has for another.
struct Offer {
  // By the receiver: one line, which the sender looks at.
  alignas(kLine) std::atomic<uint32_t> answers;  // how many this place has got
  Answer answer;                                 // the last one
  Way way;                                       // of what is accepted
  uint32_t turn;                                 // among what is accepted
  // By the sender. The receiver of a short message that it expects reads none of it.
  alignas(kLine) uint64_t address;  // of all the data in the sender's process; 0: do not read there
  fl_site site;                     // where the call was made; as the signature
  fl_signature signature;           // the sender's; once refused the receiver's
};

// How an offer is announced: all that the receiver of a tiny message needs is in one line.
struct Envelope {
  int32_t tag;
  uint32_t place;   // of the offer in its table
  uint64_t digest;  // of what the sender calls: digest_of
  uint32_t eager;   // bytes that came with the offer
  char tiny[kTinyMessage];  // these, if they are not more; else in the eager piece
};
struct alignas(kLine) Posting {
  std::atomic<uint32_t> number;  // of the message, from 1; raised last
  Envelope envelope;
};
static_assert(sizeof(Posting) == kLine, "a tiny message is one cache line");

// From one rank to another: its offers lie in a table, the latest are announced one after the other in a
// ring as long as that, and the data of accepted ones flows through the pieces, one after the other.
struct alignas(kLine) Channel {
  std::atomic<uint32_t> filled;                  // pieces so far, by the sender
  alignas(kLine) std::atomic<uint32_t> drained;  // pieces so far, by the receiver
  std::atomic<uint32_t> wanting;                 // bits: which of these tags it waits for
  std::atomic<int32_t> wanted[kWanted];
};

// Rank blocks, then the ranks' slots, then channels, their postings, their offers and their pieces.
class Segment {
 public:
  static size_t bytes_for(int ranks);

  Segment() = default;
  Segment(Mapping mapping, int ranks);

  const Mapping& mapping() const { return mapping_; }
  void close_file() { mapping_.close_file(); }
  RankBlock& block(int rank) const { return blocks_[rank]; }
  char* slot(int rank, uint32_t chunk) const {
    return slots_ + (static_cast<size_t>(rank) * kSlots + chunk % kSlots) * chunk_bytes_;
  }
  size_t chunk_bytes() const { return chunk_bytes_; }
  Channel& channel(int from, int to) const { return channels_[pair(from, to)]; }
  // Places for offers in each channel, a power of two.
  uint32_t offers() const { return offers_per_channel_; }
  Offer& offer(int from, int to, uint32_t place) const {
    return offers_[pair(from, to) * offers_per_channel_ + place];
  }
  Posting& posting(int from, int to, uint32_t number) const {
    return postings_[pair(from, to) * offers_per_channel_ + number % offers_per_channel_];
  }
  char* piece(int from, int to, uint32_t number) const {
    return pieces_of(from, to) + number % kPieces * piece_bytes_;
  }
  // The data that comes with an offer, of one at a time.
  char* eager_piece(int from, int to) const {
    return pieces_of(from, to) + kPieces * piece_bytes_;
  }
  size_t piece_bytes() const { return piece_bytes_; }

 private:
  // Every rank has a channel to every other, and none to itself.
  size_t pair(int from, int to) const {
    return static_cast<size_t>(from) * (ranks_ - 1) + (to > from ? to - 1 : to);
  }
  char* pieces_of(int from, int to) const {
    return pieces_ + pair(from, to) * (kPieces + 1) * piece_bytes_;
  }

  Mapping mapping_;
  int ranks_ = 0;
  RankBlock* blocks_ = nullptr;
  char* slots_ = nullptr;
  size_t chunk_bytes_ = 0;
  Channel* channels_ = nullptr;
  Posting* postings_ = nullptr;
  Offer* offers_ = nullptr;
  uint32_t offers_per_channel_ = 0;
  char* pieces_ = nullptr;
  size_t piece_bytes_ = 0;
};

}  // namespace fl
