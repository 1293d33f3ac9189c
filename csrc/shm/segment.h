// The memory that the ranks of one host share, and its layout.
#pragma once

#include "../common/abi.h"
#include "../common/choice.h"
#include "../common/engine.h"
#include "../common/futex.h"
#include "counter.h"

namespace fl {

// A mapped file in memory. The destructor unmaps and closes it.
class Mapping {
 public:
  // Create the file exclusively, for this user only, or use an unnamed file that a process has open
  // (/proc/PID/fd/N). Throws std::system_error. A name stays until unlink(). With `reserve` the memory is
  // allocated now, else on first use: only a named file can run out of space.
  static Mapping create(const std::string& path, size_t bytes, bool reserve = true);
  // Map a file that this user has created. Throws std::system_error.
  static Mapping open(const std::string& path, size_t bytes);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  // Close the file. Until then the file stays open, because it holds locks.
  void close_file();

  // Lock byte `number` of the file until it is closed, also by the end of the process; false if impossible.
  // is_locked() returns true if another mapping holds the lock. Unlike a pidfd, a lock works across containers.
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
constexpr uint32_t kCalls = sized(16, 5);    // calls of a rank that other ranks can read
constexpr uint32_t kPayloads = sized(4, 2);  // payloads of a rank that other ranks can read

// Number of calls by which a rank may be ahead of another rank. Each rank can then still read the other's
// calls while it makes a call: see Collectives::find_room.
constexpr uint32_t kMostAhead = (kCalls - 1) / 2;

// The announcement of a rank's call. A tiny call is in the first of two lines, so one line must move between
// cores. Calls are aligned to two lines, because processors prefetch lines in pairs. The number is raised last.
struct alignas(2 * kLine) Call {
  Counter number;
  uint32_t kind;  // part_of, verb, dtype, op and the flags of entering.cc
  int32_t root;   // root, or 0
  int64_t count;  // elements
  double scale;
  uint64_t shape;     // hash
  uint64_t location;  // region and offset of data in shared memory; else 0
  union {
    char tiny[kTinyBytes];
    uint32_t payload;  // index of the payload with the data, up to kInlineBytes
    struct {
      uint64_t address;  // address of the data in this rank's process
      Costs costs;
    } large;  // more than kInlineBytes
  };
};
static_assert(offsetof(Call, tiny) + kTinyBytes == kLine, "a tiny call is one cache line");

// The full description of a call, read only for errors and unknown shapes.
struct alignas(kLine) Description {
  fl_signature signature;
  int64_t called_at;   // nanoseconds of coarse_now()
  Counter site_known;  // number of the call once its site is known, after a mismatch
  fl_site site;        // set at the beginning of calls that may return ahead
};

// The reason why a rank has left the group or given up.
struct alignas(kLine) Farewell {
  static constexpr int kMaxMissing = 32;
  Counter is_set;  // 0: the rank is still active
  int32_t status;
  int32_t missing_count;
  int32_t missing[kMaxMissing];
  char message[4000];
};

// A request for a part of another rank's array that this rank cannot read: see Collectives::request_read.
struct alignas(kLine) ReadRequest {
  Counter requested;      // number of requests by this rank
  Counter served;         // number of served requests, raised by the owner
  int32_t owner;          // rank that is asked
  uint64_t begin, bytes;  // range of the data that the owner sends in this call
};

// Memory that one rank writes and other ranks read. Its counters are never reset.
struct alignas(kLine) RankBlock {
  Call calls[kCalls];  // index: call number modulo kCalls
  Description descriptions[kCalls];
  alignas(4096) char payloads[kPayloads][kInlineBytes];
  alignas(kLine) Counter filled;   // chunks that this rank has put into its slots
  alignas(kLine) Counter reduced;  // chunks of which this rank has reduced its part
  alignas(kLine) Counter drained;  // chunks of other ranks that this rank has released
  ReadRequest request;
  Farewell farewell;
  std::atomic<int64_t> left_at;             // coarse_now() when this rank called leave(); 0: not yet
  alignas(kLine) Futex futex;               // for threads of this rank that wait for messages
  alignas(kLine) std::atomic<int32_t> pid;  // written last; 0: not ready
  std::atomic<uint64_t> pid_namespace;
  std::atomic<int32_t> holds_lock;  // the rank holds the lock of its byte of the file while it lives
  uint64_t token, token_at;         // a value and its address in the process: see remote.h
};

constexpr uint32_t kMostRecords = sized(128, 4);  // maximum per channel; see records()

// Channel from one rank to another: a ring of records, and a ring of their data in the same order.
struct alignas(kLine) Channel {
  std::atomic<uint32_t> drained;                    // records released by the receiver
  alignas(kLine) std::atomic<uint32_t> wants_room;  // set by a sender without space, cleared by the receiver
};

// Layout: rank blocks, the ranks' slots, channels, their records, their data.
class Segment {
 public:
  // Return the size in bytes. A subgroup needs no channels.
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
  // Records per channel. data_bytes(): data bytes per channel. Both numbers are powers of two.
  uint32_t records() const { return records_per_channel_; }
  size_t data_bytes() const { return data_bytes_; }
  Record& record(int from, int to, uint32_t number) const {
    return records_[pair(from, to) * records_per_channel_ + number % records_per_channel_];
  }
  char* data(int from, int to) const { return data_ + pair(from, to) * data_bytes_; }

 private:
  // Return the index of the channel from one rank to another rank.
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
