//! Whose prompt a step takes first: where requests have tenants, these take turns, and within a tenant the order is that of arrival.
//! The coordinator's queue has turns of its own, but it gives a node the work of two steps at once.

use std::collections::BTreeMap;

use crate::ids::CacheTenant;

/// Prompts of tenants share a step up to so many tokens; one that is longer has a step to itself. A prompt that comes waits for the step
/// that runs, so the step of a node that several tenants use must be short. On the CPU, chunks of 64 tokens are computed as fast as longer
/// ones (docs/measurements/simulator.md, what-if).
pub(super) const SHARED_STEP_TOKENS: u32 = 64;

/// A tenant that others came before in so many steps counts as one that has had no turn, so that ever new tenants do not keep it waiting.
const PASSED_OVER_STEPS_MAX: u64 = 8;

/// The tenant of a request, or the one of all requests without a tenant.
type Tenant = Option<CacheTenant>;

#[derive(Debug, Default)]
pub(super) struct PromptTurns {
    /// Steps with prompts of tenants so far.
    steps: u64,
    /// The last step that took a prompt of this tenant. Only tenants whose prompts wait are here.
    last: BTreeMap<Tenant, u64>,
}

impl PromptTurns {
    /// Puts the prompts of the next step, as (serial, tenant), in order. Says whether any of them has a tenant.
    pub fn sort(&mut self, prompts: &mut [(u64, Tenant)]) -> bool {
        let has_tenants = prompts.iter().any(|(_, tenant)| tenant.is_some());
        self.steps += u64::from(has_tenants);
        self.last
            .retain(|tenant, _| prompts.iter().any(|(_, other)| other == tenant));
        if has_tenants {
            let earliest = self.steps.saturating_sub(PASSED_OVER_STEPS_MAX);
            let turn = |tenant: &Tenant| self.last.get(tenant).copied().filter(|last| *last >= earliest);
            prompts.sort_by_key(|(serial, tenant)| (turn(tenant), *serial));
        }
        has_tenants
    }

    /// The step takes a prompt of this tenant.
    pub fn took(&mut self, tenant: Tenant) {
        self.last.insert(tenant, self.steps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Tenant = Some(CacheTenant(1));
    const FLOOD: Tenant = Some(CacheTenant(2));

    fn order(turns: &mut PromptTurns, prompts: &[(u64, Tenant)]) -> Vec<u64> {
        let mut prompts = prompts.to_vec();
        turns.sort(&mut prompts);
        prompts.into_iter().map(|(serial, _)| serial).collect()
    }

    #[test]
    fn a_tenant_that_comes_is_before_one_that_was_served() {
        let mut turns = PromptTurns::default();
        let flood = [(1, FLOOD), (2, FLOOD), (3, FLOOD)];
        assert_eq!(order(&mut turns, &flood), [1, 2, 3]);
        turns.took(FLOOD);
        assert_eq!(order(&mut turns, &[(2, FLOOD), (3, FLOOD), (9, QUIET)]), [9, 2, 3]);
        turns.took(QUIET);
        assert_eq!(order(&mut turns, &[(2, FLOOD), (3, FLOOD), (10, QUIET)]), [2, 3, 10]);
    }

    #[test]
    fn ever_new_tenants_do_not_keep_one_waiting() {
        let mut turns = PromptTurns::default();
        order(&mut turns, &[(1, FLOOD), (2, FLOOD)]);
        turns.took(FLOOD);
        let new = |number: u64| (100 + number, Some(CacheTenant(100 + number)));
        let came_before = (0..20).take_while(|number| order(&mut turns, &[(2, FLOOD), new(*number)])[0] != 2);
        assert_eq!(came_before.count() as u64, PASSED_OVER_STEPS_MAX);
    }

    #[test]
    fn tenants_without_prompts_are_forgotten_and_requests_without_tenants_keep_their_order() {
        let mut turns = PromptTurns::default();
        order(&mut turns, &[(1, FLOOD)]);
        turns.took(FLOOD);
        assert_eq!(order(&mut turns, &[(7, None), (8, None)]), [7, 8]);
        assert!(turns.last.is_empty());
    }
}
