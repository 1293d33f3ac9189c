#include "family.h"

#include "mesh.h"

namespace fl {
namespace {

using std::chrono::milliseconds;

// kGoodbye: maximum time to wait for the delivery of notes. kDeliveryTick: time between checks for delivery.
constexpr milliseconds kGoodbye{500}, kDeliveryTick{2};

// Send `text` to the peer. Ignore errors: a rank that has left the group needs no note.
void notify_peer(Pair& pair, uint64_t group, const std::string& text) noexcept {
  try {
    pair.send_note(group, text, Mesh::is_last(text));
  } catch (const std::exception&) {
  }
}

}  // namespace

Family::Family(int rank, int size, const std::string& host, const std::string& interface,
               bool listens_on)
    : links(std::make_shared<Links>(create_device(host, interface), rank, size, listens_on)),
      connections_(size) {}

Family::~Family() {
  is_going_ = true;
  leave();
  if (heartbeat_ != nullptr) heartbeat_->ring();
  if (beats_.joinable()) beats_.join();
  engine.stop();
  links->close();
}

void Family::open(const char* addresses, size_t bytes, const char* key) {
  links->open(
      addresses, bytes, key, [this](int peer, Pair& pair) { connected(peer, pair); },
      [this](int peer, uint64_t group, const std::string& text) { handle_note(peer, group, text); },
      [this](uint64_t group) { return calls_of(group); }, wire);
}

void Family::add(Mesh& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_.emplace(group.group, &group);
  const auto early = early_.find(group.group);
  if (early == early_.end()) return;
  for (const auto& [peer, text] : early->second) group.receive_note(group.index_of(peer), text);
  early_.erase(early);
}

void Family::remove(Mesh& group) noexcept {
  const std::lock_guard<std::mutex> losing(losing_);
  notify(group, Mesh::kClosed);
  engine.forget(group.group);
  bool has_ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(group.group);
    has_ended = this->has_ended();
    for (int peer : group.members()) {
      if (connections_[peer] == nullptr) late_notes_[peer].emplace_back(group.group, group.notes);
    }
  }
  if (has_ended) links->close();
}

void Family::end(Mesh& group) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    group.has_ended = true;
    if (!has_ended()) return;
  }
  links->close();
}

bool Family::has_ended() const {
  return std::all_of(groups_.begin(), groups_.end(), [](const auto& entry) { return entry.second->has_ended; });
}

// If a peer connects during this function, either this function or connected() sends it the text.
void Family::notify(Mesh& group, const std::string& text) noexcept {
  std::vector<Pair*> connections;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    group.notes.push_back(text);
    for (int peer : group.members()) connections.push_back(connections_[peer]);
  }
  for (Pair* pair : connections) {
    if (pair != nullptr) notify_peer(*pair, group.group, text);
  }
}

void Family::forward_later(const Mesh& group, std::string text) {
  watch.soon([this, number = group.group, text = std::move(text)] {
    const std::lock_guard<std::mutex> losing(losing_);
    Mesh* group;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = groups_.find(number);
      group = found == groups_.end() ? nullptr : found->second;
    }
    if (group != nullptr) group->forward(text);
  });
}

// Wait for delivery, because the kernel drops unsent data if other data arrives at a closed connection.
void Family::deliver() const noexcept {
  const auto is_delivered = [&] {
    for (int peer = 0; peer < links->size; ++peer) {
      Pair* const pair = links->pair(peer);
      if (pair != nullptr && !pair->has_delivered(kGoodbye)) return false;
    }
    return true;
  };
  for (const auto end = Clock::now() + kGoodbye; !is_delivered() && Clock::now() < end;) {
    std::this_thread::sleep_for(kDeliveryTick);
  }
}

// Gloo's thread calls this function before any other thread sends on the connection.
void Family::connected(int peer, Pair& pair) {
  std::vector<std::pair<uint64_t, Notes>> unsent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    connections_[peer] = &pair;
    std::swap(unsent, late_notes_[peer]);
    for (const auto& [number, group] : groups_) {
      if (group->index_of(peer) >= 0) unsent.emplace_back(number, group->notes);
    }
  }
  for (const auto& [group, notes] : unsent) {
    for (const std::string& text : notes) notify_peer(pair, group, text);
  }
}

// Handle a note. If the group is unknown, store the note: this rank will create the group soon.
void Family::handle_note(int peer, uint64_t group, const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return early_[group].emplace_back(peer, text), void();
  found->second->receive_note(found->second->index_of(peer), text);
}

int64_t Family::calls_of(uint64_t group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(group);
  return found == groups_.end() ? Links::kAbsent : found->second->calls();
}

void Family::abandon() const noexcept {
  links->abandon();
  if (heartbeat_ != nullptr) heartbeat_->abandon();
}

// Hosts -----------------------------------------------------------------------------------------

std::shared_ptr<const Hosts> read_hosts(const fl_hosts& description, int size, const char* addresses,
                                        size_t bytes, const char* key) {
  std::vector<sockaddr_in6> rank_addresses(size);
  for (int r = 0; r < size; ++r) {
    sockaddr_storage address = read_address(addresses + r * bytes, bytes);
    set_port(address, description.ports[r]);
    std::memcpy(&rank_addresses[r], &address, sizeof rank_addresses[r]);
  }
  return std::make_shared<const Hosts>(
      std::vector<int>(description.numbers, description.numbers + size),
      std::vector<std::string>(description.names, description.names + description.count), std::move(rank_addresses),
      std::string(key, FL_KEY_BYTES), description.seconds);
}

int Family::listen_for_hosts() {
  const auto& address = links->address();
  heartbeat_ = std::make_unique<Heartbeat>(links->rank, read_address(address.data(), address.size()));
  return heartbeat_->port();
}

void Family::watch_hosts(std::shared_ptr<const Hosts> hosts) {
  if (!(hosts->seconds > 0)) return heartbeat_.reset();
  links->keep_alive_for(patience_ = hosts->seconds);
  if (heartbeat_ == nullptr) return;  // a group that has this one as Companion monitors the hosts
  heartbeat_->begin(std::move(hosts));
  beats_ = std::thread(&Family::beat, this);
}

// Run the heartbeat on its own thread, so that it forwards news while the watch thread ends groups.
void Family::beat() {
  while (!is_going_) {
    if (const auto lost = heartbeat_->update()) watch.soon([this, lost] { lose(*lost); });
    heartbeat_->await();
  }
}

// End each group that contains lost ranks. First set all reasons, because later steps may break connections.
void Family::lose(const Failure& failure) {
  const std::lock_guard<std::mutex> losing(losing_);
  std::vector<std::pair<Mesh*, Failure>> lost;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : groups_) {
      const Failure part_failure = entry.second->for_members(failure);
      if (!part_failure.missing.empty() && !entry.second->reason()) lost.emplace_back(entry.second, part_failure);
    }
  }
  for (const auto& [group, part_failure] : lost) group->set_reason(part_failure);
  for (const auto& [group, part_failure] : lost) group->report_to_others(part_failure);
  deliver();
  for (const auto& [group, part_failure] : lost) group->lose(part_failure);
}

}  // namespace fl
