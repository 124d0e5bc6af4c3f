//! The configurations that the token-exact comparison runs: every pair of settings occurs together at least once.

use std::fmt;

/// One way to run the same requests. All of them must give the same token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    pub topology: &'static str,
    /// `--max-num-batched-tokens`: the chunk budget.
    pub chunk_tokens: u32,
    pub threads: u32,
    /// `--block-size`: the hashes of KV blocks are compared between rows of one size.
    pub block_tokens: u32,
    pub prefix_cache: bool,
    pub kernel: &'static str,
    /// The only transport the nodes have: what cannot use it fails instead of falling back. `shm` is its staged mode,
    /// `shm-direct` the other one.
    pub transport: &'static str,
    /// `--speculative-tokens`.
    pub speculative_tokens: u32,
}

impl Configuration {
    pub fn has_prefill_pool(&self) -> bool {
        self.topology.contains('p')
    }
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = if self.prefix_cache { "on" } else { "off" };
        write!(
            f,
            "{} chunk={} threads={} block={} prefix-cache={cache} kernel={} transport={} guesses={}",
            self.topology,
            self.chunk_tokens,
            self.threads,
            self.block_tokens,
            self.kernel,
            self.transport,
            self.speculative_tokens
        )
    }
}

/// Row 0 is the baseline: one co-located node. `auto` is the best kernel of the machine (AVX-512 VNNI where there is one).
/// Eight rows cover all pairs of {topology 4} x {2} x {2} x {2} x {2 kernels} x {2 transports} x {2 block sizes} x {guesses or none}; the
/// portable kernel, slow by design, has a row of its own in `PORTABLE`.
pub const PAIRWISE: [Configuration; 8] = [
    BASELINE,
    Configuration {
        block_tokens: 32,
        chunk_tokens: 64,
        threads: 2,
        prefix_cache: true,
        kernel: OTHER_KERNEL,
        transport: "shm",
        speculative_tokens: 4,
        ..BASELINE
    },
    Configuration {
        block_tokens: 32,
        topology: "2c",
        chunk_tokens: 64,
        kernel: OTHER_KERNEL,
        ..BASELINE
    },
    Configuration {
        topology: "2c",
        threads: 2,
        prefix_cache: true,
        transport: "shm",
        speculative_tokens: 4,
        ..BASELINE
    },
    Configuration {
        topology: "1p1d",
        prefix_cache: true,
        kernel: OTHER_KERNEL,
        transport: "shm",
        ..BASELINE
    },
    Configuration {
        block_tokens: 32,
        topology: "1p1d",
        chunk_tokens: 64,
        threads: 2,
        speculative_tokens: 4,
        ..BASELINE
    },
    Configuration {
        topology: "2p2d",
        chunk_tokens: 64,
        threads: 2,
        prefix_cache: true,
        kernel: OTHER_KERNEL,
        ..BASELINE
    },
    Configuration {
        block_tokens: 32,
        topology: "2p2d",
        transport: "shm",
        speculative_tokens: 4,
        ..BASELINE
    },
];

/// Not the one that a node takes by itself.
const OTHER_KERNEL: &str = if cfg!(target_arch = "x86_64") {
    "avx2"
} else {
    "portable"
};

const BASELINE: Configuration = Configuration {
    topology: "1c",
    chunk_tokens: 512,
    threads: 1,
    block_tokens: 16,
    prefix_cache: false,
    kernel: "auto",
    transport: "grpc",
    speculative_tokens: 0,
};

/// The portable path and KV written in place, compared on fewer prompts.
pub const PORTABLE: Configuration = Configuration {
    topology: "1p1d",
    chunk_tokens: 64,
    threads: 2,
    block_tokens: 16,
    prefix_cache: true,
    kernel: "portable",
    transport: "shm-direct",
    speculative_tokens: 8,
};

/// Three nodes in a pool: six processes on the machine, so on fewer prompts too.
pub const MANY: [Configuration; 3] = [
    Configuration {
        topology: "3p1d",
        chunk_tokens: 64,
        ..BASELINE
    },
    Configuration {
        topology: "1p3d",
        prefix_cache: true,
        transport: "shm",
        ..BASELINE
    },
    Configuration {
        topology: "3p3d",
        prefix_cache: true,
        chunk_tokens: 64,
        ..BASELINE
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn factors(c: &Configuration) -> [String; 8] {
        [
            c.topology.to_owned(),
            c.chunk_tokens.to_string(),
            c.threads.to_string(),
            c.prefix_cache.to_string(),
            c.kernel.to_owned(),
            c.transport.to_owned(),
            c.block_tokens.to_string(),
            c.speculative_tokens.to_string(),
        ]
    }

    #[test]
    fn every_pair_of_settings_occurs_together() {
        let rows: Vec<[String; 8]> = PAIRWISE.iter().map(factors).collect();
        for a in 0..8 {
            for b in a + 1..8 {
                let left: BTreeSet<_> = rows.iter().map(|r| r[a].clone()).collect();
                let right: BTreeSet<_> = rows.iter().map(|r| r[b].clone()).collect();
                let seen: BTreeSet<_> = rows.iter().map(|r| (r[a].clone(), r[b].clone())).collect();
                for l in &left {
                    for r in &right {
                        assert!(seen.contains(&(l.clone(), r.clone())), "no row pairs {l} with {r}");
                    }
                }
            }
        }
    }
}
