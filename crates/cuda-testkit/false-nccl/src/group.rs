//! Owns the groups of each host thread. The operations of a group that have one communicator and one stream are one kernel, so they
//! go on together.

use std::cell::RefCell;
use std::sync::Arc;

use crate::communicator::{Communicator, FirstGroup};
use crate::exchange;
use crate::operation::{Operation, Post};
use crate::outside_abi::GiveWork;
use crate::status::{Answer, Status};

struct Group {
    depth: u32,
    /// In the order of the calls.
    posts: Vec<(Arc<Communicator>, Post)>,
}

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, posts: Vec::new() }) };
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Posts what the outermost group has.
pub(crate) fn end(give: GiveWork) -> Answer {
    let posts = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1).ok_or(Status::InvalidUsage)?;
        Ok(if group.depth == 0 {
            std::mem::take(&mut group.posts)
        } else {
            Vec::new()
        })
    })?;
    send_off(give, posts)
}

/// One operation: into the group, or as a kernel of its own.
pub(crate) fn add(give: GiveWork, communicator: Arc<Communicator>, stream: u64, operation: Operation) -> Answer {
    let left = GROUP.with_borrow_mut(|group| {
        let is_same =
            |(other, post): &&mut (Arc<Communicator>, Post)| Arc::ptr_eq(other, &communicator) && post.stream == stream;
        if group.depth == 0 {
            return vec![(
                communicator,
                Post {
                    stream,
                    operations: vec![operation],
                },
            )];
        }
        match group.posts.iter_mut().find(is_same) {
            Some((_, post)) => post.operations.push(operation),
            None => group.posts.push((
                communicator,
                Post {
                    stream,
                    operations: vec![operation],
                },
            )),
        }
        Vec::new()
    });
    send_off(give, left)
}

fn send_off(give: GiveWork, posts: Vec<(Arc<Communicator>, Post)>) -> Answer {
    let mut answer = Ok(());
    for (communicator, post) in posts {
        let now = {
            let mut inner = communicator.lock();
            match inner.first_group {
                FirstGroup::Posted => Some(post),
                FirstGroup::NotYet | FirstGroup::InProgress { .. } => {
                    inner.first_group = FirstGroup::InProgress { is_seen: false };
                    inner.deferred.push(post);
                    None
                }
            }
        };
        answer = answer.and(match now {
            Some(post) => exchange::post(give, &communicator, post),
            None => Err(Status::InProgress),
        });
    }
    answer
}
