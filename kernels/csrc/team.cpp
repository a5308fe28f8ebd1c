#include "team.hpp"

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <initializer_list>
#endif

namespace longgraft {
namespace {

using Body = void (*)(void*);
using Parallel = void (*)(Body, void*, unsigned threads, unsigned flags);

struct Runtime {
  Parallel parallel = nullptr;
  const char* name = "none";
};

#if defined(__linux__)
// The libraries that export GOMP_parallel: GNU's, and those of LLVM and Intel, which also offer GNU's interface.
int find_runtime(dl_phdr_info* info, std::size_t, void* found) {
  Runtime& runtime = *static_cast<Runtime*>(found);
  for (const char* name : {"libgomp", "libiomp5", "libomp"}) {
    const char* slash = std::strrchr(info->dlpi_name, '/');
    if (!slash || std::strncmp(slash + 1, name, std::strlen(name)) != 0) continue;
    void* library = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    if (!library) continue;
    runtime.parallel = reinterpret_cast<Parallel>(dlsym(library, "GOMP_parallel"));
    runtime.name = name;
    if (runtime.parallel) return 1;
  }
  return 0;
}
#endif

const Runtime& runtime() {
  static const Runtime found = [] {
    Runtime result;
#if defined(__linux__)
    dl_iterate_phdr(find_runtime, &result);
    if (!result.parallel) result.name = "none";
#endif
    return result;
  }();
  return found;
}

}  // namespace

void run_team(int threads, Body body, void* context) {
  if (threads > 1 && runtime().parallel) {
    runtime().parallel(body, context, static_cast<unsigned>(threads), 0);
  } else {
    body(context);
  }
}

const char* team_runtime() { return runtime().name; }

}  // namespace longgraft
