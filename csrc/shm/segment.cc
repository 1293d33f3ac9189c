#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <system_error>

namespace fl {
namespace {

constexpr size_t kPage = sized(4096, 64);
// Maximum bytes of all slots. A segment has some 10 MB, and /dev/shm of a container often 64 MB or less.
constexpr size_t kSlotBudget = 8 << 20;
constexpr size_t kDataBudget = 2 << 20;
// Maximum bytes of a chunk. A second-level cache must have space for several chunks.
constexpr size_t kMaxChunk = sized(256 << 10, 256);
constexpr size_t kMostData = sized(256 << 10, 512), kLeastData = sized(1 << 10, 512);
constexpr size_t kRecordBudget = 2 << 20;
constexpr uint32_t kLeastRecords = sized(8, 4);

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

size_t chunk_for(int ranks) {
  const size_t least = pages(2 * ranks * kLine);  // two cache lines per section
  return std::max(least, std::min(kMaxChunk, kSlotBudget / (ranks * kSlots) / kPage * kPage));
}

size_t pairs_of(int ranks) { return static_cast<size_t>(ranks) * (ranks - 1); }

// Return `most`, halved until the items of all channels need at most `budget` bytes, but at least `least`.
size_t halved(size_t most, size_t least, size_t item_bytes, int ranks, size_t budget) {
  while (most > least && pairs_of(ranks) * most * item_bytes > budget) most /= 2;
  return most;
}

size_t data_for(int ranks) { return halved(kMostData, kLeastData, 1, ranks, kDataBudget); }

uint32_t records_for(int ranks) {
  return static_cast<uint32_t>(halved(kMostRecords, kLeastRecords, sizeof(Record), ranks, kRecordBudget));
}

// False if `path` is a link in /proc to a file that a process has open.
bool has_name(const std::string& path) { return path.rfind("/proc/", 0) != 0; }

[[noreturn]] void fail(const char* message, int error = errno) {
  throw std::system_error(error, std::generic_category(), message);
}

struct flock byte_of_file(int number) {
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = number;
  range.l_len = 1;
  return range;
}

}  // namespace

Mapping Mapping::create(const std::string& path, size_t bytes, bool reserve) {
  const bool named = has_name(path);
  const int flags = named ? O_CREAT | O_NOFOLLOW : 0;
  const int fd = ::open(path.c_str(), flags | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) fail("create");
  Mapping made(fd);
  // Allocate the space now. Otherwise, a later access causes SIGBUS if the file system is full.
  const auto size = static_cast<off_t>(bytes);
  int error = EINTR;  // a signal may interrupt posix_fallocate()
  while (error == EINTR) error = reserve ? posix_fallocate(fd, 0, size) : ftruncate(fd, size) == 0 ? 0 : errno;
  if (error != 0) {
    if (named) ::unlink(path.c_str());
    fail(("reserve " + std::to_string(bytes) + " bytes").c_str(), error);
  }
  made.map(bytes);
  return made;
}

Mapping Mapping::open(const std::string& path, size_t bytes) {
  const int flags = has_name(path) ? O_NOFOLLOW : 0;
  const int fd = ::open(path.c_str(), flags | O_RDWR | O_CLOEXEC);
  if (fd < 0) fail("open");
  Mapping made(fd);
  struct stat status;
  if (fstat(fd, &status) != 0) fail("fstat");
  if (status.st_uid != geteuid() || !S_ISREG(status.st_mode)) fail("belongs to another user", EPERM);
  if (static_cast<size_t>(status.st_size) != bytes) fail("has an unexpected size", EINVAL);
  made.map(bytes);
  return made;
}

void Mapping::map(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) fail("mmap");
  data_ = static_cast<char*>(data);
  size_ = bytes;
}

Mapping::Mapping(Mapping&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_);
  close_file();
}

void Mapping::close_file() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

bool Mapping::lock(int number) const {
  struct flock range = byte_of_file(number);
  return fcntl(fd_, F_OFD_SETLK, &range) == 0;
}

bool Mapping::is_locked(int number) const {
  struct flock range = byte_of_file(number);
  return fcntl(fd_, F_OFD_GETLK, &range) != 0 || range.l_type != F_UNLCK;
}

size_t Segment::bytes_for(int ranks, bool has_channels) {
  const size_t pairs = has_channels ? pairs_of(ranks) : 0;
  return pages(ranks * sizeof(RankBlock)) + ranks * kSlots * chunk_for(ranks) +
         pages(pairs * sizeof(Channel)) + pages(pairs * records_for(ranks) * sizeof(Record)) +
         pages(pairs * data_for(ranks));
}

Segment::Segment(Mapping mapping, int ranks)
    : mapping_(std::move(mapping)), ranks_(ranks), chunk_bytes_(chunk_for(ranks)),
      records_per_channel_(records_for(ranks)), data_bytes_(data_for(ranks)) {
  const size_t pairs = pairs_of(ranks);
  char* at = mapping_.data();
  // All counters are 0, because the file was created with zeros.
  blocks_ = reinterpret_cast<RankBlock*>(at);
  slots_ = at + pages(ranks * sizeof(RankBlock));
  at = slots_ + static_cast<size_t>(ranks) * kSlots * chunk_bytes_;
  channels_ = reinterpret_cast<Channel*>(at);
  at += pages(pairs * sizeof(Channel));
  records_ = reinterpret_cast<Record*>(at);
  data_ = at + pages(pairs * records_per_channel_ * sizeof(Record));
}

}  // namespace fl
