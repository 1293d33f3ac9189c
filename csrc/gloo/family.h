// State that a group shares with its subgroups: connections, threads, descriptors, and notifications.
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

// Convert the C description of the hosts of `size` ranks; for addresses and key see fl_connect.
std::shared_ptr<const Hosts> read_hosts(const fl_hosts& description, int size, const char* addresses,
                                        size_t bytes, const char* key);

class Family {
 public:
  Family(int rank, int size, const std::string& host, const std::string& interface, bool listens_on);
  ~Family();
  Family(const Family&) = delete;

  // Begin to accept connections; see Links.
  void open(const char* addresses, size_t bytes, const char* key);

  // add() and remove() register or unregister a group. remove() notifies the members: connections stay open.
  void add(Mesh& group);
  void remove(Mesh& group) noexcept;
  // Mark `group` as unusable. If no usable group remains, close all connections.
  void end(Mesh& group) noexcept;

  // Notify the members of `group`, including members that connect later.
  void notify(Mesh& group, const std::string& text) noexcept;
  // Have the watch thread call group.forward(text) if the group still exists. The group may be locked.
  void forward_later(const Mesh& group, std::string text);
  // Wait until notifications are delivered to all peers, except peers that are silent for half a second.
  void deliver() const noexcept;

  // Monitor the hosts. If a host is lost, end the groups with ranks on that host and notify other ranks.
  int listen_for_hosts();
  void watch_hosts(std::shared_ptr<const Hosts> hosts);
  // Announce that this rank may leave from now on without being reported as lost.
  void leave() {
    if (heartbeat_ != nullptr) heartbeat_->leave();
  }
  // Seconds until a lost host is detected. 0 means that hosts are not monitored.
  double patience() const { return patience_; }

  // In a forked child, where the threads do not exist: close the descriptors.
  void abandon() const noexcept;

  const std::shared_ptr<Links> links;
  const std::shared_ptr<ThreadPool> crew = std::make_shared<ThreadPool>();  // threads for asynchronous operations
  GlooWire wire{*links};
  Engine engine{wire, links->size};  // progresses messages; its ranks are ranks of the whole group

 private:
  using Notes = std::vector<std::string>;
  void connected(int peer, Pair& pair);
  void handle_note(int peer, uint64_t group, const std::string& text);
  int64_t calls_of(uint64_t group);
  void beat();
  void lose(const Failure& failure);
  // True if no usable group exists. Requires the lock.
  bool has_ended() const;

  double patience_ = 0;
  std::mutex losing_;  // held while groups handle losses, so that no group is removed
  std::mutex mutex_;  // guards the members below; to hold a pair's lock too, lock the pair first
  std::map<uint64_t, Mesh*> groups_;
  std::vector<Pair*> connections_;  // to each rank; null: not connected
  // By rank: notifications of removed groups for members that connect later.
  std::map<int, std::vector<std::pair<uint64_t, Notes>>> late_notes_;
  // Notifications about groups that this rank has not created yet.
  std::map<uint64_t, std::vector<std::pair<int, std::string>>> early_;
  std::unique_ptr<Heartbeat> heartbeat_;  // null: all ranks are on one host
  std::atomic<bool> is_going_{false};
  std::thread beats_;

 public:
  Watch watch;  // last: destroyed before the objects that it watches
};

}  // namespace fl
