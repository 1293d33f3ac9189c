// Descriptors of a group's sockets. A forked child must close its copies: while they are open, peers do not
// notice that this rank was killed.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <system_error>

namespace fl {

// Throw the errno of a failed system call.
[[noreturn]] inline void fail_in(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

// A file descriptor. Its device and inode show whether its number now refers to another file.
struct Descriptor {
  int number = -1;  // no descriptor
  dev_t device = 0;
  ino_t inode = 0;

  static Descriptor of(int number) noexcept;
  // In a forked child: close the descriptor unless its number now refers to another file.
  void close_if_same() const noexcept;
};

class Descriptors {
 public:
  explicit Descriptors(size_t capacity) : descriptors_(new Descriptor[capacity]), capacity_(capacity) {}

  // Add a descriptor, unless `capacity` descriptors have been added already. Not thread-safe.
  void add(int descriptor);

  // In a forked child: call close_if_same() for every descriptor.
  void close_all() const noexcept;

 private:
  const std::unique_ptr<Descriptor[]> descriptors_;
  const size_t capacity_;
  std::atomic<size_t> count_{0};
};

}  // namespace fl
