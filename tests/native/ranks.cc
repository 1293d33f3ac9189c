#include "ranks.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

namespace stress {

void in_processes(int ranks, const std::function<void(int)>& run) {
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = fork();
    check(child >= 0, "fork failed");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      run(r);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  int failed = -1;
  for (int r = 0; r < ranks; ++r) {
    int status = 0;
    waitpid(children[r], &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) failed = r;
  }
  check(failed < 0, "process of rank " + std::to_string(failed) + " failed");
}

}  // namespace stress
