// State that a group shares with its subgroups: connections, threads, descriptors and notes.
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

  // Register a group, or remove it. remove() notifies the members, because the connections remain open.
  void add(Mesh& group);
  void remove(Mesh& group) noexcept;
  // Mark `group` as unusable. If all groups are unusable, close all connections.
  void end(Mesh& group) noexcept;

  // Send the note `text` to the members of `group`, also to members that connect later.
  void notify(Mesh& group, const std::string& text) noexcept;
  // Call group.forward(text) on the watch thread, if the group still exists. The caller may hold group locks.
  void forward_later(const Mesh& group, std::string text);
  // Wait until all peers have received their notes, except peers that do not answer for half a second.
  void deliver() const noexcept;

  // Monitor the hosts. If a host is lost, end the groups with ranks on that host and notify other ranks. Call
  // both functions before Mesh::connect(). listen_for_hosts() returns a port or throws std::runtime_error.
  int listen_for_hosts();
  void watch_hosts(std::shared_ptr<const Hosts> hosts);
  // Announce that this rank may leave from now on without being reported as lost.
  void leave() {
    if (heartbeat_ != nullptr) heartbeat_->leave();
  }
  // Maximum seconds until a lost host is detected, or 0 if hosts are not monitored.
  double patience() const { return patience_; }

  // In a forked child, where the threads do not exist: close the descriptors.
  void abandon() const noexcept;

  const std::shared_ptr<Links> links;
  const std::shared_ptr<ThreadPool> crew = std::make_shared<ThreadPool>();  // for started operations
  GlooWire wire{*links};
  Engine engine{wire, links->size};  // it uses the rank numbers of the whole group

 private:
  using Notes = std::vector<std::string>;
  void connected(int peer, Pair& pair);
  void handle_note(int peer, uint64_t group, const std::string& text);
  int64_t calls_of(uint64_t group);
  void beat();
  void lose(const Failure& failure);
  // True if all groups are unusable. Requires mutex_.
  bool has_ended() const;

  double patience_ = 0;
  std::mutex losing_;  // held while a lost rank ends its groups, so that no group is removed meanwhile
  std::mutex mutex_;   // guards the members below; lock order: a pair's mutex, this mutex
  std::map<uint64_t, Mesh*> groups_;
  std::vector<Pair*> connections_;  // index: rank; null if not connected
  // Key: rank. Notes of removed groups. A member that connects later receives them.
  std::map<int, std::vector<std::pair<uint64_t, Notes>>> late_notes_;
  // Key: group number. (rank, note) of groups that this rank has not created yet.
  std::map<uint64_t, std::vector<std::pair<int, std::string>>> early_;
  std::unique_ptr<Heartbeat> heartbeat_;  // null if all ranks are on one host
  std::atomic<bool> is_going_{false};
  std::thread beats_;

 public:
  Watch watch;  // declared last: destroyed before the objects that it watches
};

}  // namespace fl
