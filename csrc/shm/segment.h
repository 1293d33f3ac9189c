// The memory that the ranks of one host share, and its layout.
#pragma once

#include "../common/abi.h"
#include "../common/choice.h"
#include "../common/engine.h"
#include "../common/futex.h"
#include "counter.h"

namespace fl {

// A mapped file in memory. Unmapped with the object, and closed.
class Mapping {
 public:
  // Create the file, exclusively and for this user alone, or take one without a name that a process
  // has open (/proc/PID/fd/N); throws std::system_error. A name stays until unlink(). Its memory is
  // reserved, or else taken when it is first used: only a file with a name can be too small.
  static Mapping create(const std::string& path, size_t bytes, bool reserve = true);
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
  explicit Mapping(int fd) : fd_(fd) {}
  void map(size_t bytes);
  int fd_ = -1;
  char* data_ = nullptr;
  size_t size_ = 0;
};

constexpr size_t kLine = 64;
constexpr size_t kTinyBytes = 16;
constexpr size_t kInlineBytes = sized(16384, 64);
constexpr uint32_t kSlots = sized(4, 3);
constexpr uint32_t kCalls = sized(16, 5);    // of a rank that the others can read
constexpr uint32_t kPayloads = sized(4, 2);  // data of a rank's calls that the others can read

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
struct alignas(kLine) ReadRequest {
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
  ReadRequest request;
  Farewell farewell;
  std::atomic<int64_t> left_at;  // since when, of coarse_now(), it begins no more messages; 0: it does
  alignas(kLine) Futex futex;  // for the threads of this rank that wait for messages
  alignas(kLine) std::atomic<int32_t> pid;  // written last; 0: not there yet
  std::atomic<uint64_t> pid_namespace;
  std::atomic<int32_t> holds_lock;  // of its byte of the file, while it lives
  uint64_t token, token_at;  // a number, and where it also lies in the process: see remote.h
};

constexpr uint32_t kMostRecords = sized(128, 4);  // of a channel; see records()

// From one rank to another: a ring of records, and one of the data that comes with them, which lies in the
// order of the records.
struct alignas(kLine) Channel {
  std::atomic<uint32_t> drained;  // records so far, by the receiver
  alignas(kLine) std::atomic<uint32_t> wants_room;  // set by a sender that has none, taken by the receiver
};

// Rank blocks, then the ranks' slots, then channels, their records and their data.
class Segment {
 public:
  // A part of a group that has a segment needs no channels.
  static size_t bytes_for(int ranks, bool has_channels = true);

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
  // Records in each channel, and bytes of data, powers of two.
  uint32_t records() const { return records_per_channel_; }
  size_t data_bytes() const { return data_bytes_; }
  Record& record(int from, int to, uint32_t number) const {
    return records_[pair(from, to) * records_per_channel_ + number % records_per_channel_];
  }
  char* data(int from, int to) const { return data_ + pair(from, to) * data_bytes_; }

 private:
  // Every rank has a channel to every other, and none to itself.
  size_t pair(int from, int to) const {
    return static_cast<size_t>(from) * (ranks_ - 1) + (to > from ? to - 1 : to);
  }
  Mapping mapping_;
  int ranks_ = 0;
  RankBlock* blocks_ = nullptr;
  char* slots_ = nullptr;
  size_t chunk_bytes_ = 0;
  Channel* channels_ = nullptr;
  Record* records_ = nullptr;
  uint32_t records_per_channel_ = 0;
  char* data_ = nullptr;
  size_t data_bytes_ = 0;
};

}  // namespace fl
