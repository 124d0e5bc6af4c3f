//! Steps: what the scheduler plans takes as long as the costs say, and every draw is a number.

use std::time::Duration;

use serving_core::cluster::Leg;
use serving_core::scheduler::SampledToken;

use super::World;
use super::agenda::{Event, ToNode};
use super::node::Running;
use super::prompts::output_token;
use crate::arithmetic::{factor, keyed, seconds};
use crate::costs::{StepKind, StepShape};

/// The stream of draws that each prompt has one of, whichever node computes it. Nodes have streams of their own, from 2 on.
const OF_PROMPTS: u64 = u64::MAX;

impl World<'_> {
    /// One round of the loop: permits, a step, what is told of both.
    pub(super) fn turn(&mut self, node: usize) {
        self.nodes[node].is_turn_due = false;
        let is_full = self.is_push_queue_full(node);
        let own = &mut self.nodes[node];
        own.scheduler.pause_grants(is_full || own.draining.is_some());
        self.give_up_when_late(node);
        self.begin_step(node);
        self.deliver(node);
        self.publish(node);
        self.leave_when_empty(node);
    }

    /// After everything else that happens in this instant.
    pub(super) fn turn_soon(&mut self, node: usize) {
        if !std::mem::replace(&mut self.nodes[node].is_turn_due, true) {
            let (place, what) = (self.place(node), ToNode::Turn);
            self.agenda.at(self.agenda.now(), Event::Node { place, what });
        }
    }

    fn begin_step(&mut self, node: usize) {
        let now = self.now();
        let own = &mut self.nodes[node];
        if own.running.is_some() {
            return;
        }
        own.scheduler.next_step(now);
        let Some(plan) = own.scheduler.running_step() else {
            return;
        };
        let mut shape = StepShape::default();
        let mut pushed = Vec::new();
        let vocab_size = self.scenario.nodes.limits.vocab_size;
        own.sampled.clear();
        for (number, row) in plan.rows().iter().enumerate() {
            shape.add(row.token_count, row.first_position, row.draws);
            for choice in plan.draws(number) {
                let index = plan.output_index(number).0;
                own.sampled.push(SampledToken {
                    row: u32::try_from(number).unwrap_or(u32::MAX),
                    choice,
                    token: Ok(output_token(row.key.request, index, vocab_size)),
                    logprobs: None,
                });
            }
            let stream = own.streams.get(&row.key).filter(|stream| stream.leg == Leg::Prefill);
            if stream.is_some_and(|stream| stream.ticket.is_some()) && !own.pushes.contains_key(&row.key) {
                pushed.push(row.key);
            }
        }
        let costs = &self.scenario.costs;
        let first_prompt = plan.rows().iter().find(|row| row.token_count > 1);
        let bits = match first_prompt.map(|row| row.key.request.0 as u64) {
            // How long a prompt takes varies, not each of its chunks: the costs are fitted to prompts of one step.
            Some(prompt) => keyed(self.scenario.seed, OF_PROMPTS, prompt),
            None => keyed(self.scenario.seed, node as u64 + 2, own.steps),
        };
        let typical = costs.step.seconds(&shape) + own.cold_seconds(&shape, now, &costs.step.cold);
        let computing = typical * factor(bits, costs.step.variation_of(&shape));
        own.steps += 1;
        own.running = Some(Running {
            serial: own.steps,
            kind: shape.kind(),
            left: costs.overheads.loop_seconds + computing,
            speed: 0.0,
            since: now,
            computed: Duration::ZERO,
        });
        self.computing_changed(node, shape.kind(), true);
        for key in pushed {
            self.begin_handoff(node, key);
        }
    }

    /// One node more or fewer computes: whoever shares its machine is timed anew.
    pub(super) fn computing_changed(&mut self, node: usize, kind: StepKind, is_one_more: bool) {
        if self.hosts.count(node, kind, is_one_more) {
            for neighbour in self.hosts.neighbours(node) {
                self.time_anew(neighbour);
            }
        } else if is_one_more {
            self.time_anew(node);
        }
    }

    pub(super) fn time_anew(&mut self, node: usize) {
        let now = self.now();
        let own = &mut self.nodes[node];
        let is_paused = own.paused.is_some();
        let Some(running) = &mut own.running else {
            return;
        };
        let speed = self.hosts.speed(node, running.kind, &self.scenario.costs.host);
        running.left -= now.since(running.since).as_secs_f64() * running.speed;
        running.computed = running.computed_by(now);
        running.since = now;
        running.speed = if is_paused { 0.0 } else { speed };
        // Its earlier end is void.
        running.serial += 1 << 32;
        if is_paused {
            return;
        }
        let (left, serial) = (seconds(running.left / speed), running.serial);
        self.send_to(left, (node, ToNode::StepEnd { serial }));
    }

    pub(super) fn end_step(&mut self, node: usize, serial: u64) {
        let now = self.now();
        let own = &mut self.nodes[node];
        let Some(running) = own.running.take_if(|running| running.serial == serial) else {
            return;
        };
        own.busy += running.computed_by(now);
        own.computed_until = now;
        let mut sampled = std::mem::take(&mut own.sampled);
        own.scheduler.step_done(now, &mut sampled);
        own.sampled = sampled;
        let used = own.scheduler.pool().counts();
        let used = used.active + used.reserved + used.in_transfer + used.quarantined;
        own.kv_blocks_used_max = own.kv_blocks_used_max.max(used);
        self.computing_changed(node, running.kind, false);
        self.deliver(node);
        // A hold may have begun.
        self.tick_soon(node);
        self.turn_soon(node);
    }
}
