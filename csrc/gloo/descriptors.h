// The descriptors of Gloo's connections. Gloo keeps them to itself, and open across exec and fork,
// where a connection lives on as long as the child: peers would not notice that a rank was killed.
#pragma once

#include <gloo/transport/device.h>
#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace fl {

class Descriptors {
 public:
  // Addresses of listening sockets, as Gloo gives them: of this process's pairs, and of its peers'.
  void add(const std::vector<char>& address) { addresses_.insert(key_of(address)); }

  // Find `device`'s own descriptor, and all sockets of this process that are bound or connected to
  // one of these addresses; they are closed on exec from now on.
  void find(const gloo::transport::Device& device);

  // Have the kernel watch over the connections that are found from now on; see keep_alive.
  void keep_alive_for(double seconds) { seconds_ = seconds; }

  // Close what was found and is still the same, in a forked child.
  void close_all() const noexcept;

 private:
  struct Found {
    int descriptor;
    dev_t device;
    ino_t inode;
  };
  static std::string key_of(const std::vector<char>& address);
  bool is_ours(int socket) const;

  std::set<std::string> addresses_;
  std::vector<Found> found_;
  double seconds_ = 0;
};

}  // namespace fl
