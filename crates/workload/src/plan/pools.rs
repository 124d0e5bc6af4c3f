//! How many prefill nodes and how many decode nodes a load needs, and how a fixed number of nodes is best split.
//!
//! The work of a pool is its token rate times the measured time of a node for one token. Both pools are balanced when both
//! reach their ceilings at the same rate. The same balance is the idea of DistServe's placement (Y. Zhong et al., OSDI
//! 2024, section 4), which searches it by simulation; here it is one division, and `baton simulate` does the search.

use super::PlanError;
use super::check::{finite, open_share, positive, servers};

/// Splits that are shown on each side of the best one.
const NEIGHBOURS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolLoad {
    /// Requests a second.
    pub rate: f64,
    /// Prompt tokens of a request that a prefill node computes.
    pub prompt_tokens: f64,
    pub output_tokens: f64,
    /// Seconds of a prefill node for one prompt token.
    pub prefill_s: f64,
    /// Seconds of a decode node for one output token: the time of a step by the sequences in it.
    pub decode_s: f64,
    pub prefill_ceiling: f64,
    pub decode_ceiling: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pools {
    /// Nodes that are busy on average.
    pub prefill_busy: f64,
    pub decode_busy: f64,
    /// Prefill nodes for one decode node, when both work at their ceilings.
    pub prefill_by_decode: f64,
    pub prefill_nodes: u32,
    pub decode_nodes: u32,
}

/// # Errors
/// An input is not above 0, or a ceiling is not between 0 and 1.
pub fn pools(load: PoolLoad) -> Result<Pools, PlanError> {
    let (prefill_s, decode_s) = work_of_a_request(load)?;
    let rate = positive("the rate", load.rate)?;
    let (prefill_busy, decode_busy) = (rate * prefill_s, rate * decode_s);
    let prefill = finite("the prefill pool", prefill_busy / load.prefill_ceiling)?;
    let decode = finite("the decode pool", decode_busy / load.decode_ceiling)?;
    Ok(Pools {
        prefill_busy,
        decode_busy,
        prefill_by_decode: prefill / decode,
        prefill_nodes: servers("the number of prefill nodes", prefill)?,
        decode_nodes: servers("the number of decode nodes", decode)?,
    })
}

/// Seconds of a prefill node and of a decode node for one request.
fn work_of_a_request(load: PoolLoad) -> Result<(f64, f64), PlanError> {
    open_share("the utilisation of the prefill pool", load.prefill_ceiling)?;
    open_share("the utilisation of the decode pool", load.decode_ceiling)?;
    let prefill = positive("the prompt's length", load.prompt_tokens)? * positive("the prefill cost", load.prefill_s)?;
    let decode = positive("the answer's length", load.output_tokens)? * positive("the decode cost", load.decode_s)?;
    Ok((
        positive("the prefill work of a request", prefill)?,
        positive("the decode work of a request", decode)?,
    ))
}

/// A split of a fixed number of nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    pub prefill_nodes: u32,
    pub decode_nodes: u32,
    /// The rate at which the first pool reaches its ceiling.
    pub rate_max: f64,
    pub prefill_is_the_limit: bool,
    pub is_best: bool,
}

/// The splits of `nodes` around the one that takes the highest rate.
///
/// # Errors
/// There are fewer than two nodes, or an input is not above 0.
pub fn splits(load: PoolLoad, nodes: u32) -> Result<Vec<Split>, PlanError> {
    if nodes < 2 {
        return Err(PlanError::TooFewNodes { nodes });
    }
    servers("the number of nodes", f64::from(nodes))?;
    let (prefill_s, decode_s) = work_of_a_request(load)?;
    let split = |prefill_nodes: u32| {
        let prefill = f64::from(prefill_nodes) * load.prefill_ceiling / prefill_s;
        let decode = f64::from(nodes - prefill_nodes) * load.decode_ceiling / decode_s;
        Split {
            prefill_nodes,
            decode_nodes: nodes - prefill_nodes,
            rate_max: prefill.min(decode),
            prefill_is_the_limit: prefill < decode,
            is_best: false,
        }
    };
    // The rate of one pool rises and that of the other falls, so the best split is beside the crossing.
    let better = |best: Split, next: Split| if next.rate_max > best.rate_max { next } else { best };
    let best = (1..nodes)
        .map(split)
        .reduce(better)
        .map_or(1, |best| best.prefill_nodes);
    let near = best.saturating_sub(NEIGHBOURS).max(1)..=best.saturating_add(NEIGHBOURS).min(nodes - 1);
    let marked = near.map(|prefill_nodes| Split {
        is_best: prefill_nodes == best,
        ..split(prefill_nodes)
    });
    Ok(marked.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: PoolLoad = PoolLoad {
        rate: 10.0,
        prompt_tokens: 2_000.0,
        output_tokens: 200.0,
        prefill_s: 100e-6,
        decode_s: 500e-6,
        prefill_ceiling: 0.5,
        decode_ceiling: 0.5,
    };

    #[test]
    fn each_pool_has_nodes_for_its_own_work() {
        let pools = pools(LOAD).unwrap();
        assert!((pools.prefill_busy - 2.0).abs() < 1e-12 && (pools.decode_busy - 1.0).abs() < 1e-12);
        assert!((pools.prefill_by_decode - 2.0).abs() < 1e-12);
        assert_eq!((pools.prefill_nodes, pools.decode_nodes), (4, 2));
    }

    #[test]
    fn the_best_split_of_six_nodes_is_the_one_that_was_asked_for() {
        let splits = splits(LOAD, 6).unwrap();
        let best = splits.iter().find(|split| split.is_best).unwrap();
        assert_eq!((best.prefill_nodes, best.decode_nodes), (4, 2));
        assert!((best.rate_max - 10.0).abs() < 1e-9);
        assert!(splits.iter().all(|split| split.rate_max <= best.rate_max));
        assert_eq!(splits.len(), 5, "all splits of six nodes");
        let is_limit: Vec<bool> = splits.iter().map(|split| split.prefill_is_the_limit).collect();
        assert!(is_limit[0] && !is_limit[4]);
    }

    #[test]
    fn bad_inputs_are_typed_errors() {
        assert_eq!(splits(LOAD, 1), Err(PlanError::TooFewNodes { nodes: 1 }));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            for load in [
                PoolLoad { rate: bad, ..LOAD },
                PoolLoad {
                    prompt_tokens: bad,
                    ..LOAD
                },
                PoolLoad {
                    output_tokens: bad,
                    ..LOAD
                },
                PoolLoad { prefill_s: bad, ..LOAD },
                PoolLoad { decode_s: bad, ..LOAD },
                PoolLoad {
                    prefill_ceiling: bad,
                    ..LOAD
                },
                PoolLoad {
                    decode_ceiling: bad,
                    ..LOAD
                },
            ] {
                assert!(pools(load).is_err(), "{load:?}");
            }
        }
        assert!(
            pools(PoolLoad {
                prefill_ceiling: 1.0,
                ..LOAD
            })
            .is_err()
        );
        assert!(
            splits(
                PoolLoad {
                    prefill_s: 1e-300,
                    prompt_tokens: 1e-300,
                    ..LOAD
                },
                4
            )
            .is_err()
        );
    }
}
