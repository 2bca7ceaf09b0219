"""From a bare box to a served model: recipes, and the steps that `onebox up` goes through."""
