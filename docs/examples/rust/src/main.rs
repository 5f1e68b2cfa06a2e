//! Continuous batching over a paged cache: prompts in chunks beside decode steps, in one launch.
//!
//!     PREFLASH_LIB_DIR=$(python -m preflash config --libdir) cargo run
//!
//! The model is one layer of attention whose q, k and v are made of a token and its position. Each
//! request is then served alone: its tokens are the same, because the plans are batch-invariant.

mod memory;
mod preflash;

use memory::Buffer;
use preflash::{Batch, Error, Plan, Shape};

const SHAPE: Shape = Shape { num_qo_heads: 4, num_kv_heads: 2, head_dim: 64, page_size: 16 };
const PAGES: usize = 256;
const CHUNK: usize = 64; // prompt tokens of a step
const SLOTS: usize = 8; // requests of a step
const VOCABULARY: u32 = 97;

struct Request {
    tokens: Vec<u32>,
    cached: usize, // tokens whose keys and values are in the cache
    goal: usize,
    pages: Vec<i32>,
}

struct Engine {
    plan: Plan,
    k: Buffer,
    v: Buffer,
    free: Vec<i32>,
    steps: usize,
}

impl Engine {
    fn new() -> Result<Engine, Error> {
        let bytes = 2 * PAGES * SHAPE.page_size * SHAPE.num_kv_heads * SHAPE.head_dim;
        let free = (0..PAGES as i32).rev().collect();
        let (k, v) = (Buffer::new(bytes), Buffer::new(bytes));
        Ok(Engine { plan: Plan::new(SHAPE)?, k, v, free, steps: 0 })
    }

    /// Computes one batch, and appends the next token to each request whose prompt is done.
    fn step(&mut self, running: &mut [Request]) -> Result<(), Error> {
        let mut left = CHUNK;
        let (mut batch, mut rows) = (Vec::new(), Vec::new()); // (request, new tokens); values of q
        for (i, request) in running.iter_mut().enumerate() {
            let missing = request.tokens.len() - request.cached;
            let new = if missing == 1 { 1 } else { missing.min(left) };
            if new == 0 {
                continue;
            }
            left -= if missing == 1 { 0 } else { new };
            for at in request.cached..request.cached + new {
                self.append(request, at);
                rows.extend(values(request.tokens[at], at, 0, SHAPE.num_qo_heads));
            }
            batch.push((i, new));
        }
        let mut arrays = Batch {
            qo_indptr: vec![0], kv_indptr: vec![0], last_page_len: vec![], pages: vec![],
        };
        for &(i, new) in &batch {
            let (request, keys) = (&running[i], running[i].cached + new);
            arrays.qo_indptr.push(arrays.qo_indptr.last().unwrap() + new as i32);
            arrays.pages.extend(&request.pages);
            arrays.kv_indptr.push(arrays.pages.len() as i32);
            arrays.last_page_len.push(((keys - 1) % SHAPE.page_size + 1) as i32);
        }
        self.plan.batch(&arrays)?;
        let mut q = Buffer::new(2 * rows.len());
        q.write(0, &rows);
        let mut out = Buffer::new(2 * rows.len());
        self.plan.run(&q, &self.k, &self.v, &mut out)?;
        let out: Vec<u16> = out.read(rows.len());
        let width = SHAPE.num_qo_heads * SHAPE.head_dim;
        for (&(i, new), end) in batch.iter().zip(&arrays.qo_indptr[1..]) {
            let (request, end) = (&mut running[i], *end as usize);
            request.cached += new;
            if request.cached == request.tokens.len() {
                request.tokens.push(token_of(&out[(end - 1) * width..end * width]));
            }
        }
        self.steps += 1;
        Ok(())
    }

    /// Writes the keys and values of a token into the cache.
    fn append(&mut self, request: &mut Request, at: usize) {
        if at / SHAPE.page_size == request.pages.len() {
            // NOTE: a real engine makes room where no page is free.
            request.pages.push(self.free.pop().expect("no page is free"));
        }
        let page = request.pages[at / SHAPE.page_size] as usize;
        let slot = page * SHAPE.page_size + at % SHAPE.page_size;
        let first = slot * SHAPE.num_kv_heads * SHAPE.head_dim;
        self.k.write(first, &values(request.tokens[at], at, 1, SHAPE.num_kv_heads));
        self.v.write(first, &values(request.tokens[at], at, 2, SHAPE.num_kv_heads));
    }

    fn serve(&mut self, prompts: &[Vec<u32>], new_tokens: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut waiting: Vec<usize> = (0..prompts.len()).rev().collect();
        let (mut owners, mut running) = (Vec::new(), Vec::new());
        let mut done = vec![Vec::new(); prompts.len()];
        while !waiting.is_empty() || !running.is_empty() {
            while running.len() < SLOTS && !waiting.is_empty() {
                let i = waiting.pop().unwrap();
                let goal = prompts[i].len() + new_tokens;
                owners.push(i);
                running.push(Request { tokens: prompts[i].clone(), cached: 0, goal, pages: vec![] });
            }
            self.step(&mut running)?;
            for i in (0..running.len()).rev() {
                if running[i].tokens.len() >= running[i].goal {
                    let request = running.remove(i);
                    self.free.extend(request.pages);
                    done[owners.remove(i)] = request.tokens;
                }
            }
        }
        Ok(done)
    }
}

/// bfloat16 values of a token's heads, from -2 to 2. which: 0 for q, 1 for k, 2 for v.
fn values(token: u32, position: usize, which: u64, heads: usize) -> Vec<u16> {
    let seed = (u64::from(token) << 32) ^ ((position as u64) << 2) ^ which;
    (0..(heads * SHAPE.head_dim) as u64)
        .map(|i| {
            let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let value = ((x >> 40) as f32 / (1 << 22) as f32) - 2.0;
            (value.to_bits() >> 16) as u16
        })
        .collect()
}

/// The next token: a hash of the output's bits, so that one other bit is another token.
fn token_of(row: &[u16]) -> u32 {
    let hash = row.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &bits| {
        (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash >> 32) as u32 % VOCABULARY
}

fn main() {
    let lengths = [5, 130, 33, 64, 17, 80, 1, 200, 12];
    let prompts: Vec<Vec<u32>> =
        lengths.iter().map(|&n| (0..n).map(|i| (7 * n + i) % VOCABULARY).collect()).collect();
    let mut engine = Engine::new().unwrap_or_else(|error| panic!("{}", error.0));
    let together = engine.serve(&prompts, 16).unwrap_or_else(|error| panic!("{}", error.0));
    println!("{}, {} steps", engine.plan.variant(), engine.steps);
    for (prompt, tokens) in prompts.iter().zip(&together) {
        println!("{:4} tokens, then {:?}", prompt.len(), &tokens[prompt.len()..]);
        let alone = engine.serve(std::slice::from_ref(prompt), 16).unwrap();
        assert_eq!(&alone[0], tokens, "alone a request has other tokens");
    }
    println!("each has the same tokens alone");
}
