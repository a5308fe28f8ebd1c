// Runs one function on several threads. Knows nothing of what it runs.
//
// A second pool of threads would fight with torch's, whose workers spin between regions; so the OpenMP runtime
// that torch has already loaded is looked up at run time and its pool is used. Without one: the caller alone.
#pragma once

namespace longgraft {

// Call body(context) on at most `threads` threads of the process's OpenMP pool, the caller's included, and return
// when all have returned. `body` must do all the work for any number of threads, one included, and must not throw.
void run_team(int threads, void (*body)(void* context), void* context);

// Name of the OpenMP runtime in use, or "none".
const char* team_runtime();

}  // namespace longgraft
