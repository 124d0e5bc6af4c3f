//! `baton compare`: co-located, disaggregated and conditional arms on the same trace at equal cores, and what follows from it.

mod budget;
mod cores;
mod facts;
mod order;
mod point;
