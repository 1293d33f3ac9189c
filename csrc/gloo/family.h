// What a group and the groups that are made of it have in common: connections, threads, descriptors, and what
// their members tell each other of the groups.
#pragma once

#include "../common/engine.h"
#include "../common/queue.h"
#include "abi.h"
#include "heartbeat.h"
#include "links.h"
#include "waiter.h"
#include "wire.h"

namespace fl {

class Mesh;

// What the C ABI knows of the hosts of `size` ranks; for addresses and key see fl_connect.
std::shared_ptr<const Hosts> read_hosts(const fl_hosts& given, int size, const char* addresses,
                                        size_t bytes, const char* key);

class Family {
 public:
  Family(int rank, int size, const std::string& host, const std::string& interface, bool listens_on);
  ~Family();
  Family(const Family&) = delete;

  // Begin to answer; see Links.
  void open(const char* addresses, size_t bytes, const char* key);

  // A group begins; and goes. Its members are told that, for it is not to be seen from their connections.
  void add(Mesh& group);
  void remove(Mesh& group) noexcept;
  // It can be used no more: where that is so of all there are no connections any more.
  void end(Mesh& group) noexcept;

  // Tell the members of `group`, also those that connect later.
  void tell(Mesh& group, const std::string& text) noexcept;
  // Have it pass `text` on, unless it is gone by then; its lock may be held.
  void soon_pass_on(const Mesh& group, std::string text);
  // Return when what was told has got there, or will not for half a second.
  void deliver() const noexcept;

  // Notice when hosts cannot be reached any more: which ends the groups that are there, and have others end.
  int listen_for_hosts();
  void watch_hosts(std::shared_ptr<const Hosts> hosts);
  // This rank may go from now on, and is not lost then.
  void leave() {
    if (heartbeat_ != nullptr) heartbeat_->leave();
  }
  // Seconds in which it is known whether a host is lost; 0: that is not watched.
  double patience() const { return patience_; }

  // In a forked child, whose threads are not here.
  void abandon() const noexcept;

  const std::shared_ptr<Links> links;
  const std::shared_ptr<Crew> crew = std::make_shared<Crew>();  // for what is started
  GlooWire wire{*links};
  Engine engine{wire, links->size};  // of messages; ranks are those of the whole

 private:
  using Told = std::vector<std::string>;
  void connected(int peer, Pair& pair);
  void told(int peer, uint64_t group, const std::string& text);
  int64_t calls_of(uint64_t group);
  void beat();
  void lose(const Failure& failure);
  // Whether there is no group, or none that can be used; the lock is held.
  bool has_ended() const;

  double patience_ = 0;
  std::mutex losing_;  // held where groups hear of losses: none goes meanwhile
  std::mutex mutex_;   // of what follows; a pair may be locked before, and never after
  std::map<uint64_t, Mesh*> groups_;
  std::vector<Pair*> connections_;  // by rank; null: there is none yet
  // Of groups that are gone what their members are told that connect later, by rank.
  std::map<int, std::vector<std::pair<uint64_t, Told>>> last_words_;
  // What members have told of groups that this rank has not made yet.
  std::map<uint64_t, std::vector<std::pair<int, std::string>>> early_;
  std::unique_ptr<Heartbeat> heartbeat_;  // null: all are on one host
  std::atomic<bool> is_going_{false};
  std::thread beats_;

 public:
  Watch watch;  // last: it ends before what it looks at
};

}  // namespace fl
