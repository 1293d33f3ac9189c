#include "descriptors.h"

#include <sys/stat.h>
#include <unistd.h>

namespace fl {

void Descriptors::add(int descriptor) {
  const size_t count = count_;
  struct stat status;
  if (count == most_ || fstat(descriptor, &status) != 0) return;
  found_[count] = {descriptor, status.st_dev, status.st_ino};
  count_ = count + 1;
}

void Descriptors::close_all() const noexcept {
  for (size_t i = 0; i < count_; ++i) {
    const Found& found = found_[i];
    struct stat status;
    const bool is_open = fstat(found.descriptor, &status) == 0;
    if (is_open && status.st_dev == found.device && status.st_ino == found.inode) {
      close(found.descriptor);
    }
  }
}

}  // namespace fl
