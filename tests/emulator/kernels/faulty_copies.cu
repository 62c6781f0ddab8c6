// Kernels with a mistake to choose: `fault` 0 is right. Comments "here: name" mark the lines that
// reports must name.
#include "ptx.cuh"

constexpr u32 STAGES = 3, TILE = 64;

// Loads 16 x 16 halves into shared memory by cp.async, then as matrix fragments. fault 1: no __syncwarp
// after the wait; 2: no wait; 3: the wait leaves the last group in flight; 4: copies past the source.
extern "C" __global__ void load_fragments(const u16* in, u32* out, u32 fault) {
  __shared__ __align__(16) u16 tile[16][16];
  const u32 lane = threadIdx.x;
  u16* const row = &tile[lane / 2][lane % 2 * 8];
  ptx::cp_async_16(row, in + 8 * lane + (fault == 4 ? 8 : 0));  // here: fragment copy
  ptx::cp_async_commit();
  if (fault == 1) __syncwarp();  // the copies are on their way, of all lanes
  if (fault == 3) {
    ptx::cp_async_wait<1>();
  } else if (fault != 2) {
    ptx::cp_async_wait<0>();
  }
  if (fault != 1) __syncwarp();
  u32 fragment[4];
  ptx::ldmatrix_x4(fragment, &tile[lane % 16][lane / 16 * 8]);  // here: fragment load
  for (int k = 0; k < 4; k++) out[4 * lane + k] = fragment[k];
}

// A ring of cp.async stages. fault 1: waits for too few groups; 2: no barrier before a stage is
// refilled.
extern "C" __global__ void stream(const float4* in, float4* out, u32 tiles, u32 fault) {
  __shared__ float4 ring[STAGES][TILE];
  const u32 i = threadIdx.x;
  const auto issue = [&](u32 tile) {
    if (tile < tiles)
      ptx::cp_async_16(&ring[tile % STAGES][i], in + tile * TILE + i);  // here: stream copy
    ptx::cp_async_commit();
  };
  for (u32 tile = 0; tile < STAGES - 1; tile++) issue(tile);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (u32 tile = 0; tile < tiles; tile++) {
    if (fault == 2) issue(tile + STAGES - 1);
    if (fault == 1) {
      ptx::cp_async_wait<STAGES - 1>();
    } else {
      ptx::cp_async_wait<STAGES - 2>();
    }
    __syncthreads();
    const float4 v = ring[tile % STAGES][(i + 1) % TILE];  // here: stream read
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    if (fault != 2) issue(tile + STAGES - 1);
  }
  out[i] = sum;
}

// A ring of bulk copies: thread 0 produces, warps 1 and 2 consume. fault 1: the producer does not wait
// for an empty stage; 2: consumers release a stage before they read it; 3: consumers wait for the phase
// before; 4: one lane releases for its warp without __syncwarp; 5: too many bytes expected; 6: too few;
// 7: a misaligned target; 8: a source past the end; 9: a consumer waits for another stage; 10: the
// barriers are used before all threads know of their initialisation.
extern "C" __global__ void bulk_stream(const float* in, float* out, u32 tiles, u32 fault) {
  __shared__ __align__(128) float ring[STAGES + 1][TILE];
  __shared__ u64 full[STAGES], empty[STAGES];
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < STAGES; s++) {
      ptx::mbarrier_init(&full[s], 1);  // here: bulk init
      ptx::mbarrier_init(&empty[s], 2);
    }
    ptx::mbarrier_init_fence();
  }
  if (fault != 10) __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 s = tile % STAGES, round = tile / STAGES;
      if (fault != 1) ptx::mbarrier_wait_parity(&empty[s], (round & 1u) ^ 1u);  // here: bulk empty
      const u32 expected = TILE * 4 + (fault == 5 ? 16 : 0) - (fault == 6 ? 16 : 0);
      ptx::mbarrier_arrive_expect_tx(&full[s], expected);  // here: bulk expect
      const float* source = in + tile * TILE + (fault == 8 ? TILE : 0);
      ptx::bulk_copy(ring[s] + (fault == 7 ? 1 : 0), source, TILE * 4, &full[s]);  // here: bulk copy
    }
  } else if (threadIdx.x >= 32) {
    const u32 i = threadIdx.x - 32;
    float sum = 0.0f;
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 s = tile % STAGES;
      const u32 awaited = fault == 9 && i == 63 ? 0 : s;
      const u32 parity = (tile / STAGES & 1u) ^ (fault == 3 ? 1u : 0u);
      ptx::mbarrier_wait_parity(&full[awaited], parity);  // here: bulk wait
      if (fault == 2 && i % 32 == 0) ptx::mbarrier_arrive(&empty[s]);
      if (fault == 4 && i % 32 == 31) ptx::mbarrier_arrive(&empty[s]);
      sum += ring[s][i];  // here: bulk read
      if (fault != 4) __syncwarp();
      if (fault != 2 && fault != 4 && i % 32 == 0) ptx::mbarrier_arrive(&empty[s]);
    }
    out[i] = sum;
  }
}

// A ring that warp 0 fills by cp.async, 8 bytes a lane, and a note by lane 0; warps 1 and 2 consume. A
// stage is full after 32 arrivals of copies and the one for the note. fault 1: consumers do not wait; 2:
// lanes arrive before they copy; 3: one arrival too few is counted on; 4: one too many; 5: the producer
// does not wait for an empty stage; 6: nobody arrives for the note; 7: lane 31 copies and never arrives,
// and is not counted on.
extern "C" __global__ void arrive_stream(const float* in, float* out, u32 tiles, u32 fault) {
  __shared__ __align__(16) float ring[STAGES][TILE];
  __shared__ u32 notes[STAGES];
  __shared__ u64 full[STAGES], empty[STAGES];
  if (threadIdx.x == 0) {
    const u32 arrivals = fault == 4 ? 34 : fault == 3 || fault == 6 || fault == 7 ? 32 : 33;
    for (u32 s = 0; s < STAGES; s++) {
      ptx::mbarrier_init(&full[s], arrivals);
      ptx::mbarrier_init(&empty[s], 2);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const u32 lane = threadIdx.x;
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 s = tile % STAGES, round = tile / STAGES;
      if (fault != 5) ptx::mbarrier_wait_parity(&empty[s], (round & 1u) ^ 1u);  // here: arrive empty
      if (lane == 0) notes[s] = tile;                                           // here: arrive note
      if (fault == 2) ptx::cp_async_mbarrier_arrive_noinc(&full[s]);
      ptx::cp_async_small<8>(&ring[s][2 * lane], in + tile * TILE + 2 * lane);  // here: arrive copy
      if (fault != 2 && (fault != 7 || lane != 31))
        ptx::cp_async_mbarrier_arrive_noinc(&full[s]);  // here: arrive late
      if (lane == 0 && fault != 6) ptx::mbarrier_arrive(&full[s]);
    }
  } else {
    const u32 i = threadIdx.x - 32;
    float sum = 0.0f;
    for (u32 tile = 0; tile < tiles; tile++) {
      const u32 s = tile % STAGES;
      if (fault != 1) ptx::mbarrier_wait_parity(&full[s], tile / STAGES & 1u);  // here: arrive wait
      sum += ring[s][i];                                                        // here: arrive read
      sum += static_cast<float>(notes[s] - tile);                               // here: arrive note read
      __syncwarp();
      if (i % 32 == 0) ptx::mbarrier_arrive(&empty[s]);
    }
    out[i] = sum;
  }
}
