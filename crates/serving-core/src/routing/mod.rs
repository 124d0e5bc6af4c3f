//! Which node of a pool gets a request: one trait, one policy per file, nothing but facts in and a choice out.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

use crate::ids::{NodeId, RequestId};
use crate::request::Lane;

mod least_loaded;
mod power_of_two;
mod prefix_aware;
mod round_robin;

pub use least_loaded::LeastLoaded;
pub use power_of_two::PowerOfTwo;
pub use prefix_aware::PrefixAware;
pub use round_robin::RoundRobin;

/// What a policy may know of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestFacts {
    pub id: RequestId,
    pub prompt_tokens: u32,
    pub choice_count: u32,
    pub lane: Lane,
}

/// Which choice is asked for. The decode node is chosen first, then the prefill node among those that can reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pool {
    Decode,
    Prefill,
}

/// One node that could take the request now: it is ready, compatible, not suspected, and its permits suffice.
/// Candidates come sorted by node id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub node: NodeId,
    /// Permits left after this request took its share: blocks (decode) or prompt tokens (prefill).
    pub permits_left: u64,
    /// Sequences given to the node by this coordinator and not ended.
    pub sequences: u32,
    pub sequences_max: u32,
    /// Prompt tokens that wait or run on the node: reported, plus what was sent since.
    pub waiting_tokens: u64,
    pub kv_blocks_used: u32,
    pub kv_blocks: u32,
    /// Prompt tokens of the request that the node has cached, as the prefix directory believes.
    pub cached_tokens: u32,
}

/// Why a candidate won: the label of `baton_routing_decisions_total{reason}`. Closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RouteReason {
    /// There was one candidate.
    OnlyCandidate,
    /// It carried the least load.
    LeastLoaded,
    /// It has more of the prompt cached than others that carried about the same load.
    Cached,
    /// Several carried the same load: the lowest id won, or the one that the request drew.
    Tie,
    /// It was its turn.
    Turn,
}

impl RouteReason {
    pub const ALL: [Self; 5] = [
        Self::OnlyCandidate,
        Self::LeastLoaded,
        Self::Cached,
        Self::Tie,
        Self::Turn,
    ];

    pub fn name(self) -> &'static str {
        match self {
            RouteReason::OnlyCandidate => "only_candidate",
            RouteReason::LeastLoaded => "least_loaded",
            RouteReason::Cached => "cached",
            RouteReason::Tie => "tie",
            RouteReason::Turn => "turn",
        }
    }
}

/// `index` points into the candidates that were offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub index: usize,
    pub reason: RouteReason,
}

/// One routing policy. It may keep state of its own, but no lock, no clock and no randomness.
pub trait Router: Debug + Send {
    /// `None` only when there is no candidate.
    fn rank(&mut self, pool: Pool, request: &RequestFacts, candidates: &[Candidate]) -> Option<Choice>;
}

/// Declares the policies: the type that ranks, and its name in the configuration.
macro_rules! policies {
    ($($policy:ident = $name:literal,)+) => {
        /// The policies by their configuration name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum RoutingPolicy {
            $(#[serde(rename = $name)] $policy,)+
        }

        impl RoutingPolicy {
            pub const ALL: &[Self] = &[$(Self::$policy,)+];

            pub fn build(self) -> Box<dyn Router> {
                match self {
                    $(Self::$policy => Box::new($policy::default()),)+
                }
            }
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$policy => $name,)+
                }
            }
        }
    };
}

policies! {
    LeastLoaded = "least-loaded",
    PrefixAware = "prefix-aware",
    PowerOfTwo = "power-of-two",
    RoundRobin = "round-robin",
}

impl RoutingPolicy {
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|policy| policy.name() == name)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ids::{NodeEpoch, NodeName};

    pub(crate) fn candidate(name: &str, sequences: u32, waiting_tokens: u64) -> Candidate {
        Candidate {
            node: NodeId {
                name: NodeName::new(name),
                epoch: NodeEpoch(1),
            },
            permits_left: 100,
            sequences,
            sequences_max: 16,
            waiting_tokens,
            kv_blocks_used: sequences * 4,
            kv_blocks: 128,
            cached_tokens: 0,
        }
    }

    pub(crate) fn facts() -> RequestFacts {
        RequestFacts {
            id: RequestId(1),
            prompt_tokens: 40,
            choice_count: 1,
            lane: Lane::Interactive,
        }
    }

    #[test]
    fn every_policy_chooses_none_of_none_and_the_only_one_of_one() {
        for policy in RoutingPolicy::ALL {
            let mut router = policy.build();
            assert_eq!(RoutingPolicy::by_name(policy.name()), Some(*policy));
            for pool in [Pool::Decode, Pool::Prefill] {
                assert_eq!(router.rank(pool, &facts(), &[]), None);
                let one = [candidate("a", 3, 3)];
                let choice = router.rank(pool, &facts(), &one).map(|c| (c.index, c.reason));
                assert_eq!(choice, Some((0, RouteReason::OnlyCandidate)));
            }
        }
    }
}
