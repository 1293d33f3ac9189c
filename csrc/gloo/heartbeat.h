// Detection of lost hosts and dead processes.
//
// Each rank regularly sends one byte to a rank of the next host, which answers with one byte. In addition,
// one rank of each host asks a rank of each host at distance 2, 4, 8, ... Each host is therefore asked from
// several hosts, and its loss is detected even if the neighbour hosts are lost as well. If a host stays
// silent, this rank asks all ranks of that host over new connections, because one rank may be stopped or
// busy. It also asks ranks of other hosts (witnesses). If no host answers, this host is cut off.
//
// If a connection ends and its rank has not announced that it leaves, its process has died.
//
// A rank sends the news of a loss immediately to all connected ranks and to the ranks of its host. They
// forward it. Hosts are connected at distances 1, 2, 4, ..., so news needs about log2(hosts) steps. Each rank
// reports a loss a little later, so that hosts that are lost at the same time are in one report.
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

  const std::vector<int> numbers;             // host number of each rank, from 0 without gaps
  const std::vector<std::string> names;       // name of each host
  const std::vector<sockaddr_in6> addresses;  // address of each rank's Heartbeat
  const std::string key;                      // secret key for proofs of membership
  const double seconds;                       // a host is lost after this silence
  std::vector<std::vector<int>> ranks;        // ranks of each host
  size_t most = 0;                            // maximum number of ranks on one host
};

// The heartbeat of one rank. It has its own connections, because a beat behind 64 MB of data on a slow link
// would arrive too late. A few connections suffice, because any rank can answer for its host. One thread does
// all work and never blocks. It reads arrived beats every 0.25 s. Other data wakes it.
class Heartbeat {
 public:
  // Listen at `local` on a free port. Throws std::runtime_error.
  Heartbeat(int rank, sockaddr_storage local) : rank_(rank), listener_(local) {}
  Heartbeat(const Heartbeat&) = delete;

  int port() const { return listener_.port(); }
  // Maximum time between the arrival of a beat and the moment this rank reads it.
  static constexpr std::chrono::milliseconds kLongestInterval{250};
  // Set the hosts. Call it before the first update().
  void begin(std::shared_ptr<const Hosts> hosts);

  // Send and answer beats, and detect losses. Return a new loss with its reason: all ranks of the lost hosts
  // (FL_HOST_LOST), or ranks whose processes have died (FL_PEER_LOST). Each loss is returned once.
  std::optional<Failure> update();
  // Latest time at which update() must be called again.
  Clock::time_point due() const { return due_; }
  // Wait until due() or until data arrives.
  void await();
  // From any thread: announce that this rank may leave without being reported as lost.
  void leave();
  // From any thread: end a running await(), and let later calls of await() return immediately.
  void ring() noexcept { listener_.ring(); }

  // In a forked child: close the sockets.
  void abandon() const noexcept;

 private:
  struct Link {
    Line line;
    Clock::time_point since;
    bool is_ours;           // this rank asks and the peer answers
    int peer = -1;          // -1: an accepted connection without a proof
    bool is_fresh = false;  // created after the peer's host became silent
    bool has_shown = false, is_proven = false;
    bool is_leaving = false;  // the peer has announced that it leaves
    size_t news_sent = 0;     // number of bytes of news_ sent on this link
  };
  struct Watched {  // a host that this rank asks
    int distance;  // difference of host numbers; 1: the next host with present ranks
    int host;
    Clock::time_point heard;  // time of the last answer
  };
  struct Doubt {  // a silent host
    Clock::time_point since;
    bool has_answered = false;  // the host's kernel has answered
  };
  struct Loss {
    char kind;
    Clock::time_point since;
  };
  using Losses = std::map<int, Loss>;  // key: host number, or number of hosts + rank

  int host(int rank) const { return hosts_->numbers[rank]; }
  std::vector<int> present(int host) const;  // ranks of the host that have not left
  std::vector<int> local_receivers() const;
  std::vector<int> witnesses() const;
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
  std::mutex mutex_;  // guards the members that change after begin()
  bool is_leaving_ = false;
  std::shared_ptr<const Hosts> hosts_;
  Prover prover_;
  int own_host_ = 0, host_index_ = 0;  // host_index_: index of this rank on its host
  Clock::duration interval_{}, doubt_{}, limit_{}, settling_{};
  Clock::time_point looked_, beats_, due_;  // times of the last update(), next beats, next update()
  Clock::time_point visited_;               // time of the last beat from another host
  std::list<Link> links_;
  std::list<Watched> watched_;
  std::map<int, Doubt> doubts_;  // key: number of a host that is asked over new connections
  std::set<int> left_;           // ranks that have left the group or have died
  Losses lost_, unsent_, unreported_;
  Clock::time_point sends_at_, reports_ = kNever;
  std::string news_;  // all news so far, in the form that is sent
};

}  // namespace fl
