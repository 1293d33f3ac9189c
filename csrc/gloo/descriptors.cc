#include "descriptors.h"

#include <sys/stat.h>
#include <unistd.h>

namespace fl {

Descriptor Descriptor::of(int number) noexcept {
  struct stat status;
  if (fstat(number, &status) != 0) return {};
  return {number, status.st_dev, status.st_ino};
}

void Descriptor::close_if_same() const noexcept {
  struct stat status;
  const bool is_open = number >= 0 && fstat(number, &status) == 0;
  if (is_open && status.st_dev == device && status.st_ino == inode) close(number);
}

void Descriptors::add(int descriptor) {
  const size_t count = count_;
  const Descriptor identity = Descriptor::of(descriptor);
  if (count == capacity_ || identity.number < 0) return;
  descriptors_[count] = identity;
  count_ = count + 1;
}

void Descriptors::close_all() const noexcept {
  for (size_t i = 0; i < count_; ++i) descriptors_[i].close_if_same();
}

}  // namespace fl
