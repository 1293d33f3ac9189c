// Detection of lost hosts and dead processes.
//
// Each rank regularly asks one rank of the next host, which answers: one byte each way. In addition, one rank
// of each host asks a rank of the hosts at distances 2, 4, 8, ... Each host is therefore asked from near and
// far, and its loss is detected even if its neighbours are lost too. If a host stays silent, this rank asks
// the other ranks of that host over new connections, because one rank may be stopped or busy. It also asks
// witnesses on other hosts: if no witness answers, this host itself is cut off.
//
// If a connection ends and its rank has not announced that it leaves, its process has died.
//
// News is sent at once to all connected ranks and to the ranks of this host, which forward it. Since hosts
// are connected at distances 1, 2, 4, ..., news reaches all hosts in as many steps as the host count has
// bits. Each rank reports a loss a little later, so that hosts that are lost together are reported together.
#pragma once

#include <netinet/in.h>

#include <list>
#include <map>
#include <set>

#include "../common/operation.h"
#include "abi.h"
#include "line.h"
#include "proof.h"

namespace fl {

// The hosts of a group's ranks, equal on all ranks.
struct Hosts {
  Hosts(std::vector<int> numbers, std::vector<std::string> names, std::vector<sockaddr_in6> addresses,
        std::string key, double seconds);
  int count() const { return static_cast<int>(names.size()); }

  const std::vector<int> numbers;             // by rank: host number, from 0 without gaps
  const std::vector<std::string> names;       // of each host, by number
  const std::vector<sockaddr_in6> addresses;  // by rank: address of its Heartbeat, IPv4 or IPv6
  const std::string key;                      // secret key of the proofs
  const double seconds;                       // silence after which a host is lost
  std::vector<std::vector<int>> ranks;        // ranks of each host
  size_t most = 0;                            // maximum number of ranks on one host
};

// The heartbeat of one rank. It uses separate connections, because a byte queued behind 64 MB on a slow link
// would be late. A few connections suffice, because any rank can answer for its host. Everything runs on one
// thread without blocking. Beats do not wake that thread, which reads them every 0.25 s; other data does.
class Heartbeat {
 public:
  // Listen at `local` on a free port. Throws.
  Heartbeat(int rank, sockaddr_storage local) : rank_(rank), listener_(local) {}
  Heartbeat(const Heartbeat&) = delete;

  int port() const { return listener_.port(); }
  // Maximum time until this rank reads a beat that has arrived.
  static constexpr std::chrono::milliseconds kLongestInterval{250};
  // Set the hosts. Call it before the first update().
  void begin(std::shared_ptr<const Hosts> hosts);

  // Ask, answer and decide. Return a new loss with its reason: all ranks of lost hosts (FL_HOST_LOST), or
  // ranks whose processes have died (FL_PEER_LOST). Each loss is returned once.
  std::optional<Failure> update();
  // Latest time of the next update().
  Clock::time_point due() const { return due_; }
  // Wait until due() or until data arrives.
  void await();
  // From any thread: announce that this rank may leave without being reported as lost.
  void leave();
  // From any thread: make all further await() calls return at once.
  void ring() noexcept { listener_.ring(); }

  // In a forked child: close the sockets.
  void abandon() const noexcept;

 private:
  struct Link {  // a connection with one rank
    Line line;
    Clock::time_point since;
    bool is_ours;  // this rank asks, the peer answers
    int peer = -1;          // an asking rank sends its number first
    bool is_fresh = false;  // made after the host became silent
    bool has_shown = false, is_proven = false;
    bool is_leaving = false;  // the peer has announced that it leaves
    size_t news_sent = 0;     // bytes of news sent
  };
  struct Watched {  // a host that this rank asks
    int distance;  // number of hosts from this host; 1: the next host with present ranks
    int host;
    Clock::time_point heard;  // time of the last answer
  };
  struct Doubt {  // a host under suspicion
    Clock::time_point since;
    bool has_answered = false;  // the host's kernel has answered
  };
  struct Loss {
    char kind;
    Clock::time_point since;
  };
  using Losses = std::map<int, Loss>;  // by host number; lost ranks have the key number of hosts + rank

  int host(int rank) const { return hosts_->numbers[rank]; }
  std::vector<int> present(int host) const;  // ranks of the host that have not left
  std::vector<int> local_receivers() const;  // ranks of this host that get the news
  std::vector<int> witnesses() const;        // other hosts
  Watched* watched(int host);
  bool is_silent(const Watched& entry, Clock::duration time) const { return looked_ - entry.heard >= time; }

  void accept_guests();
  void listen();
  void listen_to(Link& link);
  bool is_proven_now(Link& link);
  bool has_beaten(Link& link);
  void handle_answer(Link& answers);

  void ask_hosts();
  bool choose(Watched& entry);
  void ask(int peer, bool is_fresh);
  void ask_again(int peer);

  void judge();
  void add_loss(int host, const Loss& loss);
  void read_news(const std::string& text);
  void send_news();
  std::optional<Failure> report();
  std::string describe(const Losses& lost) const;

  const int rank_;
  Listener listener_;
  std::mutex mutex_;  // guards the mutable members
  bool is_leaving_ = false;
  std::shared_ptr<const Hosts> hosts_;
  Prover prover_;
  int own_host_ = 0, host_index_ = 0;  // this rank's host; its index among the ranks of the host
  Clock::duration interval_{}, doubt_{}, limit_{}, settling_{};
  Clock::time_point looked_, beats_, due_;  // last update(), next beats, next update()
  Clock::time_point visited_;               // last question from another host
  std::list<Link> links_;
  std::list<Watched> watched_;
  std::map<int, Doubt> doubts_;  // key: silent host that this rank asks over new connections
  std::set<int> left_;           // ranks that have left the group or have died
  Losses lost_, unsent_, unreported_;
  Clock::time_point sends_at_, reports_ = kNever;
  std::string news_;  // all news so far, as sent
};

}  // namespace fl
