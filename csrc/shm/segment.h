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
  // Create a file that only this user can open, or use the unnamed file /proc/PID/fd/N. A named file exists
  // until it is unlinked. If `reserve`, allocate the memory now, because a named file may run out of space.
  // Throws std::system_error.
  static Mapping create(const std::string& path, size_t bytes, bool reserve = true);
  // Map a file that this user has created. Throws std::system_error.
  static Mapping open(const std::string& path, size_t bytes);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const { return data_; }
  size_t size() const { return size_; }
  // Close the file, which releases its locks. The memory remains mapped.
  void close_file();

  // Lock byte `number` until the file is closed or the process ends. Return false if this fails. is_locked():
  // true if another process has the lock. Unlike a pidfd, a lock can be checked from another container.
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
constexpr uint32_t kCalls = sized(16, 5);    // number of calls that the segment stores per rank
constexpr uint32_t kPayloads = sized(4, 2);  // number of payloads that the segment stores per rank

// Maximum number of calls between a rank's last compared call and its next call. With this limit, no rank
// replaces a call that another rank still reads: see Collectives::find_room.
constexpr uint32_t kMostAhead = (kCalls - 1) / 2;

// The announcement of a call; its rank writes `number` last. Tiny data is in the first of two cache lines, so
// only one line is transferred between cores. The alignment is two lines: processors prefetch pairs.
struct alignas(2 * kLine) Call {
  Counter number;
  uint32_t kind;  // part_of, verb, dtype, op, flags of entering.cc
  int32_t root;   // root, or 0
  int64_t count;  // elements
  double scale;
  uint64_t shape;     // hash_of_shape()
  uint64_t location;  // location_of() the data
  union {
    char tiny[kTinyBytes];
    uint32_t payload;  // index of the data in `payloads`; for up to kInlineBytes
    struct {
      uint64_t address;  // of the data in this rank's process
      Costs costs;
    } large;  // for more than kInlineBytes
  };
};
static_assert(offsetof(Call, tiny) + kTinyBytes == kLine, "a tiny call is one cache line");

// The complete call. It is read only for error messages and if a rank does not know the shape.
struct alignas(kLine) Description {
  fl_signature signature;
  int64_t called_at;   // coarse_now()
  Counter site_known;  // raised to the call's number when `site` is set
  fl_site site;        // set with the announcement if this rank waits for no rank
};

// The reason why a rank has left or ended the group.
struct alignas(kLine) Farewell {
  static constexpr int kMaxMissing = 32;
  Counter is_set;  // 0 while the rank is in the group
  int32_t status;
  int32_t missing_count;
  int32_t missing[kMaxMissing];
  char message[4000];
};

// A request to rank `owner`, whose memory this rank cannot read: see Collectives::request_read.
struct alignas(kLine) ReadRequest {
  Counter requested;  // number of requests
  Counter served;     // number of served requests; the owner raises it
  int32_t owner;
  uint64_t begin, bytes;  // range of the owner's data in the current call
};

// Memory that one rank writes and other ranks read. Counters count all calls and are never reset.
struct alignas(kLine) RankBlock {
  Call calls[kCalls];  // index: call number % kCalls
  Description descriptions[kCalls];
  alignas(4096) char payloads[kPayloads][kInlineBytes];
  alignas(kLine) Counter filled;   // number of chunks that this rank has filled
  alignas(kLine) Counter reduced;  // number of chunks in which this rank has reduced its part
  alignas(kLine) Counter drained;  // number of chunks that this rank has read
  ReadRequest request;
  Farewell farewell;
  std::atomic<int64_t> left_at;             // coarse_now() in leave(), or 0
  alignas(kLine) Futex futex;               // for threads that wait for messages
  alignas(kLine) std::atomic<int32_t> pid;  // 0 until all fields are set
  std::atomic<uint64_t> pid_namespace;
  std::atomic<int32_t> holds_lock;  // 1: this rank has locked its byte of the file
  uint64_t token, token_at;         // a value and its address: see remote.h
};

constexpr uint32_t kMostRecords = sized(128, 4);  // maximum of records()

// From one rank to another: a ring of records, and a ring with their data in the same order.
struct alignas(kLine) Channel {
  std::atomic<uint32_t> drained;                    // number of records that the receiver has released
  alignas(kLine) std::atomic<uint32_t> wants_room;  // set by a sender that waits for space
};

// Layout in memory: blocks, slots, channels, records of channels, data of channels.
class Segment {
 public:
  // Return the size in bytes. A subgroup has no channels.
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
  // Number of records, and bytes of data, per channel. Both are powers of two.
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
