#include "world.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <map>

#include "check.h"
#include "reach.h"

// Linked with --wrap of each function.
extern "C" {
ssize_t __real_process_vm_readv(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                                unsigned long theres, unsigned long flags);
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* at, size_t bytes);
}

namespace {

struct Shared {
  void* at;
  int users;
};

std::mutex mutex;
std::map<std::pair<dev_t, ino_t>, Shared> mapped;
std::atomic<bool> is_readable{true};

// Replacement of process_vm_readv for an emulator that lacks it.
ssize_t read_file_of(pid_t pid, const iovec& here, const iovec& there) {
  const int file = open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  const ssize_t bytes = pread(file, here.iov_base, here.iov_len, reinterpret_cast<off_t>(there.iov_base));
  close(file);
  return bytes;
}

}  // namespace

extern "C" {

// Use one address for all mappings of a file if kOneAddress.
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat status;
  if (!stress::kOneAddress || fd < 0 || fstat(fd, &status) != 0) {
    return __real_mmap(at, bytes, protection, flags, fd, offset);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  Shared& shared = mapped[{status.st_dev, status.st_ino}];
  if (shared.users++ == 0) shared.at = __real_mmap(at, bytes, protection, flags, fd, offset);
  return shared.at;
}

int __wrap_munmap(void* at, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto entry = mapped.begin(); entry != mapped.end(); ++entry) {
    if (entry->second.at != at) continue;
    if (--entry->second.users > 0) return 0;
    mapped.erase(entry);
    break;
  }
  return __real_munmap(at, bytes);
}

// Fails like on a system that forbids it.
ssize_t __wrap_process_vm_readv(pid_t pid, const iovec* here, unsigned long heres, const iovec* there,
                                unsigned long theres, unsigned long flags) {
  if (!is_readable) {
    errno = EPERM;
    return -1;
  }
  const ssize_t bytes = __real_process_vm_readv(pid, here, heres, there, theres, flags);
  return bytes < 0 && errno == ENOSYS ? read_file_of(pid, *here, *there) : bytes;
}

}  // extern "C"

namespace stress {

REACH(CollectivesOfGroup, fl::Collectives fl::ShmGroup::*, &fl::ShmGroup::collectives_);
REACH(Calls, uint32_t fl::Collectives::*, &fl::Collectives::calls_);
REACH(Compared, uint32_t fl::Collectives::*, &fl::Collectives::compared_);
REACH(ChunksSoFar, uint32_t fl::Collectives::*, &fl::Collectives::chunks_);
REACH(ChoiceOfCalls, fl::Choice fl::Collectives::*, &fl::Collectives::choice_);
REACH(FamilyOfGroup, const std::shared_ptr<fl::Family> fl::ShmGroup::*, &fl::ShmGroup::family_);
REACH(EndsOfRings, std::unique_ptr<fl::Rings::Ends[]> fl::Rings::*, &fl::Rings::ends_);

namespace {

// A path that the test for leftover files sees; unlinked soon after.
std::string new_path() {
  static int number = 0;
  return "/dev/shm/flashlight-stress-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

std::vector<fl::Mapping> map_for_each(int ranks, size_t bytes) {
  const std::string path = new_path();
  std::vector<fl::Mapping> mappings;
  mappings.push_back(fl::Mapping::create(path, bytes));
  for (int r = 1; r < ranks; ++r) mappings.push_back(fl::Mapping::open(path, bytes));
  unlink(path.c_str());
  return mappings;
}

// Set the counters as if `calls` calls, chunks, messages and pieces had preceded.
void preset(const fl::Segment& segment, int ranks, uint32_t calls) {
  for (int r = 0; r < ranks; ++r) {
    fl::RankBlock& block = segment.block(r);
    for (uint32_t i = 0; i < fl::kCalls; ++i) {
      block.calls[(calls - i) % fl::kCalls].number.raise(calls - i);
    }
    block.filled.raise(calls);
    block.reduced.raise(calls);
    block.drained.raise(calls);
    for (int to = 0; to < ranks; ++to) {
      if (to == r) continue;
      for (uint32_t i = 0; i < segment.records(); ++i) {
        segment.record(r, to, calls - i).number = calls - i;
      }
      segment.channel(r, to).drained = calls;
    }
  }
}

}  // namespace

World::World(int ranks, uint32_t calls, const std::vector<size_t>& region_strides)
    : Shape{ranks, fl::kInlineBytes, fl::kInlineBytes, 0, 0, region_strides}, calls(calls) {
  const size_t bytes = fl::Segment::bytes_for(ranks);
  std::vector<fl::Mapping> all = map_for_each(ranks + 1, bytes);
  const fl::Segment segment(std::move(all.back()), ranks);
  all.pop_back();
  mappings = std::move(all);
  chunk_bytes = segment.chunk_bytes();
  piece_bytes = segment.data_bytes() / 4;
  is_readable = calls % 3 != 0 || calls == 0;  // else all data goes through the segment
  if (calls != 0) preset(segment, ranks, calls);
  for (size_t stride : strides) {
    regions.emplace_back();
    for (fl::Mapping& mapping : map_for_each(ranks, stride * ranks)) {
      regions.back().emplace_back(std::make_shared<fl::Mapping>(std::move(mapping)), stride);
    }
  }
}

std::unique_ptr<fl::ShmGroup> World::join(int rank) {
  auto group = std::make_unique<fl::ShmGroup>(std::move(mappings[rank]), rank, ranks);
  fl::Collectives& collectives = (*group).*member_of(CollectivesOfGroup());
  collectives.*member_of(Calls()) = calls;
  collectives.*member_of(Compared()) = calls;
  collectives.*member_of(ChunksSoFar()) = calls;
  // A world has few calls, so each begins with another copy path.
  const uint32_t turn = (calls + ranks) % 9;
  collectives.*member_of(ChoiceOfCalls()) = fl::Choice(FL_VERBS, turn);
  for (int r = 0; r < ranks; ++r) {
    fl::Rings& rings = ((*group).*member_of(FamilyOfGroup()))->rings;
    fl::Rings::Ends& ends = (rings.*member_of(EndsOfRings()))[r];
    ends.sent = ends.seen_drained = ends.received = calls;
    ends.choice = fl::Choice(2, turn + r);
  }
  return group;
}

}  // namespace stress
