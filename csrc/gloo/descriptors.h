// The descriptors of a group's sockets. In a child that was forked a connection lives on as long as the
// child: peers would not notice that a rank was killed.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <memory>

namespace fl {

class Descriptors {
 public:
  explicit Descriptors(size_t most) : found_(new Found[most]), most_(most) {}

  // One thread at a time. Beyond so many as were announced they are not remembered.
  void add(int descriptor);

  // Close those that are still the same, in a forked child: whatever other threads did just then.
  void close_all() const noexcept;

 private:
  struct Found {
    int descriptor;
    dev_t device;
    ino_t inode;
  };
  const std::unique_ptr<Found[]> found_;
  const size_t most_;
  std::atomic<size_t> count_{0};
};

}  // namespace fl
